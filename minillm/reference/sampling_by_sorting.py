"""The filters of `sampling.py` as masks of rows, and the specification of its draw: mask, sort, cumulate, look up."""

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sampling import check, scale


def keep_top_k(scores: NDArray[Any], k: int, xp: ModuleType) -> NDArray[Any]:
    """Set scores below the k-th largest of their row [N, V] to -inf, in place; k = 0 or k >= V keeps all."""
    V = scores.shape[-1]
    if 0 < k < V:
        kth = xp.partition(scores, V - k, axis=-1)[:, V - k, None]  # [N, V] -> [N, 1]
        scores[scores < kth] = -xp.inf
    return scores


def keep_top_p(scores: NDArray[Any], p: float, xp: ModuleType, least: int = 1) -> NDArray[Any]:
    """Set all but the shortest prefix of each ordered row [N, V] with a share p of the mass to -inf, in place.

    At least the `least` best are kept.
    """
    if p < 1.0:
        order, cumulative = _order(scores, xp)
        last = xp.count_nonzero(cumulative < p * cumulative[:, -1:], axis=-1)  # [N, V] -> [N]: rank of the last kept
        rows, ranks = xp.nonzero(xp.arange(scores.shape[-1]) > xp.maximum(last, least - 1)[:, None])
        scores[rows, order[rows, ranks]] = -xp.inf
    return scores


def keep_min_p(scores: NDArray[Any], min_p: float, xp: ModuleType, least: int = 1) -> NDArray[Any]:
    """Set scores less than `min_p` times as likely as the best of their row [N, V] to -inf, in place.

    At least the `least` best, and ties with the last of them, are kept.
    """
    V = scores.shape[-1]
    if min_p > 0.0 and least < V:
        low = xp.exp(scores - scores.max(axis=-1, keepdims=True)) < min_p
        if least > 1:
            low &= scores < xp.partition(scores, V - least, axis=-1)[:, V - least, None]  # [N, V] -> [N, 1]
        scores[low] = -xp.inf
    return scores


def sample_by_sorting(
    logits: NDArray[np.float32],
    uniforms: NDArray[Any],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    xp: ModuleType,
) -> NDArray[np.int64]:
    """The specification of `sample`: mask, sort each row in full, cumulate, look up. Same arguments, same result."""
    check(logits, xp)
    scores = scale(logits, temperature).copy()
    scores = keep_min_p(keep_top_p(keep_top_k(scores, top_k, xp), top_p, xp), min_p, xp)
    order, cumulative = _order(scores, xp)
    mass = uniforms[:, None].astype(xp.float64) * cumulative[:, -1:]
    rank = xp.count_nonzero(cumulative < mass, axis=-1)  # [N, V] -> [N]
    tokens: NDArray[np.int64] = order[xp.arange(len(order)), rank]
    return tokens


def _order(scores: NDArray[Any], xp: ModuleType) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids of each row [N, V] by descending score, then ascending id, and the cumulative mass along that order."""
    order = xp.argsort(-scores, axis=-1, kind="stable")
    ordered = xp.take_along_axis(scores, order, axis=-1)
    return order, xp.cumsum(xp.exp(ordered - ordered[:, :1]), axis=-1, dtype=xp.float64)
