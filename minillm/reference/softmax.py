"""Softmax, log-softmax, log-probabilities of selected tokens, and selection of the best few.

Softmax and log-probabilities subtract the row's maximum first, which changes nothing in exact arithmetic and keeps exp
from overflowing. A row needs at least one finite value: a row of only -inf has no distribution (0 / 0), and NumPy
returns NaN with a RuntimeWarning.
"""

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray


def softmax(x: NDArray[Any], xp: ModuleType, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """exp(x) / sum(exp(x)) over the last axis, [..., V] -> [..., V]; `out` may be `x` itself."""
    result: NDArray[Any] = xp.subtract(x, x.max(axis=-1, keepdims=True), out=out)
    xp.exp(result, out=result)
    result /= result.sum(axis=-1, keepdims=True)
    return result


def log_softmax(x: NDArray[Any], xp: ModuleType, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Logarithm of the softmax over the last axis, [..., V] -> [..., V]; `out` may be `x` itself."""
    result: NDArray[Any] = xp.subtract(x, x.max(axis=-1, keepdims=True), out=out)
    result -= xp.log(xp.exp(result).sum(axis=-1, keepdims=True))
    return result


def log_sum_exp(logits: NDArray[Any], xp: ModuleType) -> NDArray[np.float64]:
    """log(sum(exp)) of each row, [N, V] -> [N] float64, with one row of temporary memory."""
    best = logits.max(axis=-1)  # [N, V] -> [N]
    total: NDArray[np.float64] = xp.empty(len(logits), xp.float64)
    row = xp.empty(logits.shape[-1], logits.dtype)
    for i in range(len(logits)):
        xp.exp(xp.subtract(logits[i], best[i], out=row), out=row)
        total[i] = row.sum(dtype=xp.float64)
    xp.log(total, out=total)
    total += best
    return total


def chosen_log_probs(logits: NDArray[Any], ids: NDArray[np.int64], xp: ModuleType = np) -> NDArray[np.float32]:
    """Log-probabilities of one token in each row, or of n: `logits` [N, V], `ids` [N] or [N, n] -> as ids, float32."""
    several = ids[:, None] if ids.ndim == 1 else ids
    chosen = logits[xp.arange(len(logits))[:, None], several]  # [N, V] -> [N, n]
    log_probs: NDArray[np.float32] = (chosen - log_sum_exp(logits, xp)[:, None]).astype(xp.float32).reshape(ids.shape)
    return log_probs


def top_indices(scores: NDArray[Any], n: int, xp: ModuleType) -> NDArray[np.int64]:
    """Indices of the `n` largest of `scores` [M], largest first, ties by ascending index. -> [n]

    `n` block maxima reach the n-th largest block maximum, so it is a lower bound of the n-th largest score. Few scores
    reach it, and only those are sorted.
    """
    size = max(1, int(len(scores) ** 0.5))
    blocks = len(scores) // size
    if n == 0:
        return np.empty(0, np.int64)
    if n > blocks:
        candidates = xp.arange(len(scores))
    else:
        maxima = scores[: blocks * size].reshape(blocks, size).max(axis=1)  # [M] -> [blocks]
        candidates = xp.flatnonzero(scores >= xp.partition(maxima, blocks - n)[blocks - n])
    top: NDArray[np.int64] = candidates[xp.argsort(-scores[candidates], kind="stable")[:n]]
    return top


def top_log_probs(logits: NDArray[Any], n: int, xp: ModuleType = np) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The `n` most likely tokens of each row, best first, ties by ascending id.

    `logits` [N, V], `n` from 0 to V -> their ids [N, n] int64 and their log-probabilities [N, n] float32.
    """
    ids: NDArray[np.int64] = xp.empty((len(logits), n), xp.int64)
    for i, row in enumerate(logits):
        ids[i] = top_indices(row, n, xp)
    return ids, chosen_log_probs(logits, ids, xp)
