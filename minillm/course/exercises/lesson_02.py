"""Exercises of lesson 2: one forward pass."""

import numpy as np

from . import Answer, compare

EXERCISES = ("attention", "layer_flops")


def attention(answer: Answer) -> str | None:
    """One head, causal."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 5, 4))
    value = answer(q, k, v)
    if value is None:
        return "It returns None: write the function's body."
    if np.shape(value) != (5, 4):
        return f"Three arrays [5, 4] should give [5, 4], found {[*np.shape(value)]}."
    scores = q @ k.T / 2
    seen = [np.exp(scores[i, : i + 1]) / np.exp(scores[i, : i + 1]).sum() @ v[: i + 1] for i in range(5)]
    if np.allclose(value, seen):
        return None
    if not np.allclose(value[0], v[0]):
        return "The first token sees itself alone: its result should be v[0]. Hide what comes later."
    return "The rows are not those of softmax(q k^T / sqrt(D)) v: is the root of D there, and does each row sum to 1?"


def layer_flops(answer: Answer) -> str | None:
    """Products with W^QKV, W^O, and those of the MLP."""
    expected = 2 * 8 * (192 * 576 + 192 * 192 + 192 * 768 + 768 * 192)
    if (value := answer(8, 192, 768)) is not None and 2 * value == expected:
        return "A multiplication and an addition are two FLOPs: it is half of what it should be."
    return compare("layer_flops(8, 192, 768)", value, expected) or compare("layer_flops(1, 4, 8)", answer(1, 4, 8), 256)
