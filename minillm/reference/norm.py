"""Norms over the last axis: each row to a common scale, then gain (and bias).

Layer norm brings a row to mean 0 and variance 1 (Ba, Kiros and Hinton, arXiv 1607.06450); RMS norm leaves the mean
alone and brings the mean square to 1 (Zhang and Sennrich, arXiv 1910.07467).
"""

from typing import Any

from .cost import Cost


def layer_norm(x: Any, gain: Any | None, bias: Any | None, epsilon: float, xp: Any, out: Any) -> Any:
    """(x - mean) / sqrt(variance + epsilon) * gain + bias over the last axis. [T, E] -> [T, E]

    The variance is the biased one (divided by E), as in every transformer. Without gain and bias both are left out.
    """
    y = xp.subtract(x, x.sum(axis=-1, keepdims=True) / x.shape[-1], out=out)  # x.mean() costs twice as much a call
    variance = xp.einsum("te,te->t", y, y) / x.shape[-1]  # [T, E] -> [T]; a sum of squares with no square stored
    y *= (1 / xp.sqrt(variance + epsilon))[:, None]
    if gain is not None:
        y *= gain
    if bias is not None:
        y += bias
    return y


def cost(T: int, E: int, *, affine: bool, number_bytes: int = 4) -> Cost:
    """Of layer norm. Per element: mean 1, difference 1, square and sum 2, scaling 1, gain and bias 2; per row 5 more.

    The five: two divisions by E, epsilon's addition, a square root and its reciprocal.
    """
    per_element = 7 if affine else 5
    return Cost(T * (per_element * E + 5), number_bytes * T * E + 4 * 2 * E * affine, number_bytes * T * E)


def rms_norm(x: Any, gain: Any | None, epsilon: float, xp: Any, out: Any) -> Any:
    """x / sqrt(mean(x^2) + epsilon) * gain over the last axis. [T, E] -> [T, E], or [T, heads, D] -> [T, heads, D]

    Without gain that factor is left out.
    """
    mean_square = xp.einsum("...e,...e->...", x, x) / x.shape[-1]  # [T, E] -> [T]; a sum with no square stored
    y = xp.multiply(x, (1 / xp.sqrt(mean_square + epsilon))[..., None], out=out)
    if gain is not None:
        y *= gain
    return y


def rms_norm_cost(T: int, E: int, *, affine: bool, number_bytes: int = 4) -> Cost:
    """Of RMS norm. Per element: square and sum 2, scaling 1, gain 1; per row 4 more.

    The four: a division by E, epsilon's addition, a square root and its reciprocal.
    """
    per_element = 4 if affine else 3
    return Cost(T * (per_element * E + 4), number_bytes * T * E + 4 * E * affine, number_bytes * T * E)
