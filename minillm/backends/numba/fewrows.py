"""y = activation(x W^T + b) + residual for 1 to 16 rows, on weights in every stored format.

With few rows a product is bound by reading its weights, so each is read from memory once for all rows and widened to
float32 in registers; nothing is written back. Products and sums are float32: weights are rounded, activations are not.
int4 is the exception if the CPU has VNNI: rows are rounded to int8, as for products of many rows, and multiplied as
integers (`fewints.py`).

int8 stays in float32: at 1 row, the usual case, these kernels read at the memory's bandwidth and integer dot products
are slower, and a row must have the same bits alone as among others.

A row's result is bit-identical for any number of rows and threads.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from ...reference.quantize import Quantized
from . import avx512
from .activations import ACTIVATION_CODES, finish_row
from .arguments import matrix, share_of, vector
from .compiling import shared_kernel
from .elementary import inner
from .fewints import linear_int4
from .formats import BLOCK, weight_at
from .launching import launch, shares_of
from .tiles import MOST_ROWS, PANEL, multiply_panel

NO_SCALES, NO_BIAS = np.empty((1, 0), np.uint16), np.empty(0, np.float32)
NO_RESIDUAL = np.empty((0, 0), np.float32)
ELEMENTS = {
    np.dtype(np.float32): types.float32,
    np.dtype(np.int16): types.int16,
    np.dtype(np.uint16): types.uint16,
    np.dtype(np.int8): types.int8,
    np.dtype(np.uint8): types.uint8,
}


def linear_few(
    x: NDArray[np.float32],
    weight: NDArray[Any] | Quantized,
    bias: NDArray[np.float32] | None,
    out: NDArray[np.float32],
    *,
    activation: str | None = None,
    residual: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """y = activation(x W^T + b) + residual, as `reference.linear`. All arrays are C-contiguous.

    Meant for up to 16 rows; correct for more, but slower than `manyrows.linear_many`.

    Args:
        x: [T, in]
        weight: [out, in] float32, float16, or bfloat16 as its bits in uint16; or `Quantized`
        bias: [out] or None
        out: [T, out], filled and returned; must not overlap x or residual
        activation: a key of `ACTIVATION_CODES`
        residual: [T, out] or None; not changed
    """
    scales, shift = NO_SCALES, 0
    bias, residual = NO_BIAS if bias is None else bias, NO_RESIDUAL if residual is None else residual
    if isinstance(weight, Quantized):
        if weight.values.dtype == np.uint8 and avx512.HAS_INTEGER_TILES and len(x):
            return linear_int4(x, weight, bias, out, ACTIVATION_CODES[activation], residual)
        values, scales, shift = weight.values, weight.scales.view(np.uint16), weight.group // (2 * BLOCK)
    else:
        values = weight.view(np.int16) if weight.dtype == np.float16 else weight
    panels = -(-len(values) // PANEL)
    launch(
        _kernel(values.dtype), values, x, scales, shift, bias, ACTIVATION_CODES[activation], residual, out,
        shares=shares_of(panels),
    )  # fmt: skip
    return out


@cache
def _kernel(dtype: np.dtype[Any]) -> int:
    """The kernel for weights in an array of `dtype` (float16 viewed as int16)."""
    return shared_kernel(ELEMENTS[dtype])(_multiply)


def _multiply(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """Compute a share of the panels of neighbouring outputs. [T, in] -> [T, out]"""
    weight = carray(data, (arguments[1], arguments[2]))
    x, scales = matrix(arguments, 4, np.float32), matrix(arguments, 8, np.uint16)
    group_shift, bias, activation = arguments[12], vector(arguments, 13, np.float32), arguments[15]
    residual, out = matrix(arguments, 16, np.float32), matrix(arguments, 20, np.float32)
    rows, outputs = out.shape
    parts = (rows + MOST_ROWS - 1) // MOST_ROWS
    begin, end = share_of((outputs + PANEL - 1) // PANEL, share, shares)
    for panel in range(begin, end):
        first = panel * PANEL
        stop = min(first + PANEL, outputs)
        for part in range(parts):
            row = rows * part // parts  # as even as possible: 9 rows are 4 and 5
            multiply_panel(x, weight, scales, group_shift, out, row, rows * (part + 1) // parts - row, first, stop)
        _finish(x, weight, scales, group_shift, bias, activation, residual, out, first, stop)


@inner
def _finish(
    x: Any, weight: Any, scales: Any, group_shift: int, bias: Any, activation: int, residual: Any, out: Any,
    first: int, stop: int,
) -> None:  # fmt: skip
    """Complete the sums of a panel: inputs beyond the last whole block, bias, activation, residual."""
    whole = x.shape[1] // BLOCK * BLOCK
    for row in range(len(x)):
        if whole < x.shape[1]:
            for o in range(first, stop):
                value = np.float32(0)
                for j in range(whole, x.shape[1]):
                    value += x[row, j] * weight_at(weight, scales, group_shift, o, j)
                out[row, o] += value
        finish_row(out[row, first:stop], bias[first:stop], activation, residual[row : row + 1, first:stop])
