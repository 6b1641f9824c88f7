"""LoRA beside a projection (Hu et al., arXiv 2106.09685): the rows of each adapter get its own low-rank change."""

from collections.abc import Sequence
from typing import Any

from .activation import FLOPS_PER_ELEMENT, LINEAR_ACTIVATIONS
from .cost import Cost


def add_low_rank(
    y: Any,
    x: Any,
    parts: Sequence[tuple[Any, Any, Any]],
    xp: Any,
    *,
    activation: str | None = None,
    residual: Any | None = None,
) -> Any:
    """y = activation(y + (x A^T) B^T) + residual, where each adapter's A and B apply to its own rows.

    Args:
        y: x W^T + b of the projection [T, out]; changed and returned
        x: [T, in]
        parts: for each adapter its rows [n], A [r, in], and B [out, r] with the scale in it; no row occurs twice
        xp: the array module
        activation: a name in `LINEAR_ACTIVATIONS`, or None
        residual: [T, out] or None; not modified
    """
    for rows, down, up in parts:
        y[rows] += xp.matmul(xp.matmul(x[rows], down.T), up.T).astype(y.dtype)  # [n, in] -> [n, r] -> [n, out]
    if activation is not None:
        y = LINEAR_ACTIVATIONS[activation](y, xp)
    if residual is not None:
        y += residual
    return y


def low_rank_cost(
    T: int,
    inputs: int,
    outputs: int,
    parts: Sequence[tuple[int, int]],
    *,
    activation: str | None,
    residual: bool,
    number_bytes: int = 4,
) -> Cost:
    """2 n r (in + out) + n out FLOPs for n rows of an adapter of rank r, T out for the residual, and the activation's.

    Read are x, y and the float32 A and B for the adapters' rows, all of y where there is an activation or a residual,
    and the residual. `parts` has n and r of each adapter.
    """
    rows, elements = sum(n for n, _ in parts), T * outputs
    whole = activation is not None or residual
    changed = elements if whole else rows * outputs
    flops = sum(2 * n * r * (inputs + outputs) + n * outputs for n, r in parts) + elements * residual
    if activation is not None:
        flops += elements * FLOPS_PER_ELEMENT[activation]
    matrices = sum(4 * r * (inputs + outputs) for n, r in parts if n)
    read = number_bytes * (rows * inputs + changed + elements * residual) + matrices
    between = number_bytes * sum(n * r for n, r in parts)  # x A^T, written and read
    steps = (activation is not None) + residual
    return Cost(flops, read, number_bytes * changed, 2 * between + steps * 2 * number_bytes * elements)
