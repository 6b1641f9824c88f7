"""Answers to the exercises of lesson 7."""

from typing import Any

import numpy as np


def beam_step(scores: Any, log_probs: Any, width: int) -> list[tuple[int, int]]:
    """[B], [B, V] -> `width` pairs"""
    sums = scores[:, None] + log_probs  # [B, V]
    best = np.argsort(-sums, axis=None, kind="stable")[:width]
    return [divmod(int(i), log_probs.shape[1]) for i in best]


def acceptance(p: Any, q: Any) -> float:
    """The sum over x of q(x) min(1, p(x) / q(x))."""
    return float(np.minimum(p, q).sum())
