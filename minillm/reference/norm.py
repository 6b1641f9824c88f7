"""Layer norm and RMS norm over the last axis.

Layer norm scales a row to mean 0 and variance 1 (Ba, Kiros and Hinton, arXiv 1607.06450); RMS norm scales it to mean
square 1 and does not subtract the mean (Zhang and Sennrich, arXiv 1910.07467). Then gain (and bias).
"""

from typing import Any

from .cost import Cost


def layer_norm(x: Any, gain: Any | None, bias: Any | None, epsilon: float, xp: Any, out: Any) -> Any:
    """(x - mean) / sqrt(variance + epsilon) * gain + bias over the last axis. [T, E] -> [T, E]

    The variance is the biased one (divided by E). Gain and bias may be None.
    """
    y = xp.subtract(x, x.sum(axis=-1, keepdims=True) / x.shape[-1], out=out)  # a call of x.mean() costs twice as much
    variance = xp.einsum("te,te->t", y, y) / x.shape[-1]  # [T, E] -> [T]; no array of squares
    y *= (1 / xp.sqrt(variance + epsilon))[:, None]
    if gain is not None:
        y *= gain
    if bias is not None:
        y += bias
    return y


def layer_norm_cost(T: int, E: int, *, gain: bool, bias: bool, number_bytes: int = 4) -> Cost:
    """Layer norm. Per element: mean 1, difference 1, square and sum 2, scaling 1, gain 1, bias 1; per row 5 more.

    The five: two divisions by E, epsilon's addition, a square root and its reciprocal.
    """
    vectors = gain + bias
    return Cost(T * ((5 + vectors) * E + 5), number_bytes * T * E + 4 * E * vectors, number_bytes * T * E)


def rms_norm(x: Any, gain: Any | None, epsilon: float, xp: Any, out: Any, residual: Any | None = None) -> Any:
    """x / sqrt(mean(x^2) + epsilon) * gain + residual over the last axis. [T, E] -> [T, E]

    Or of each head, [T, heads, D] -> [T, heads, D], with one gain [D] for all or [heads D] (Mamba-2's groups). Gain and
    residual may be None.
    """
    mean_square = xp.einsum("...e,...e->...", x, x) / x.shape[-1]  # [T, E] -> [T]; no array of squares
    y = xp.multiply(x, (1 / xp.sqrt(mean_square + epsilon))[..., None], out=out)
    if gain is not None:
        y *= gain.reshape(-1, x.shape[-1]) if x.ndim == 3 else gain
    if residual is not None:
        y += residual
    return y


def rms_norm_cost(
    T: int, E: int, *, affine: bool, residual: bool = False, gains: int = 1, number_bytes: int = 4
) -> Cost:
    """RMS norm. Per element: square and sum 2, scaling 1, gain 1, residual 1; per row 4 more.

    The four: a division by E, epsilon's addition, a square root and its reciprocal. `gains` are those that are read.
    """
    numbers = number_bytes * T * E
    flops = T * ((3 + affine + residual) * E + 4)
    return Cost(flops, numbers * (1 + residual) + 4 * gains * E * affine, numbers, 2 * numbers * residual)
