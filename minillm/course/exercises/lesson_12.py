"""Exercises of lesson 12: many processes."""

import math

import numpy as np

from . import Answer

EXERCISES = ("mlp_shares", "bubble")


def mlp_shares(answer: Answer) -> str | None:
    """Shares whose sum is the MLP's result."""
    rng = np.random.default_rng(1)
    x, up, down = rng.normal(size=(3, 4)), rng.normal(size=(6, 4)), rng.normal(size=(4, 6))
    shares = answer(x, up, down, 3)
    if shares is None:
        return "It returns None: write the function's body."
    if len(shares) != 3:
        return f"Three ranks should have three shares, found {len(shares)}."
    whole = np.maximum(x @ up.T, 0) @ down.T
    if not np.allclose(np.sum(shares, axis=0), whole):
        return "The shares do not sum to relu(x up^T) down^T: a rank needs the same part of F in both matrices."
    if any(np.allclose(share, whole) for share in shares):
        return "One rank computes all of it: each should have a third of F."
    return None


def bubble(answer: Answer) -> str | None:
    """(S - 1) / (M + S - 1)."""
    for S, M in ((4, 2), (4, 12), (1, 5)):
        value = answer(S, M)
        if value is None:
            return "It returns None: write the function's body."
        if not math.isclose(value, expected := (S - 1) / (M + S - 1), abs_tol=1e-9):
            return f"{S} stages with {M} parts should wait {expected:.3f} of the time, found {value:.3f}."
    return None
