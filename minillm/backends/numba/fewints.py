"""y = activation(x W^T + b) + residual for 1 to 16 rows on int4, by integer dot products, where the CPU has VNNI.

Rows are rounded to int8 first. A result has the bits of `manyrows.linear_many`, so neither rows nor threads change any.
"""

from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from ...ops.quantize import Quantized
from .activations import finish_row
from .avx512 import GROUP, LANES
from .compiling import kernel
from .integer_rows import GROUPS_A_STEP, STEP, gather_scales, multiply_tile, round_row
from .tiles import MOST_ROWS
from .workspace import work


def linear_int4(
    x: NDArray[np.float32],
    weight: Quantized,
    bias: NDArray[np.float32],
    out: NDArray[np.float32],
    activation: int,
    residual: NDArray[np.float32],
) -> NDArray[np.float32]:
    """As `fewrows.linear_few`; at least one row.

    Args:
        x: [T, in]
        weight: [out, in] in 4 bits
        bias: [out], or nothing
        out: [T, out], filled and returned
        activation: one of `ACTIVATION_CODES`
        residual: [T, out], or nothing
    """
    workers, groups = numba.get_num_threads(), weight.scales.shape[1]
    depth = 2 * weight.values.shape[1]
    rounded = depth // 2 + 4 * GROUPS_A_STEP * GROUP  # more than a row's integers, scales and corrections take
    scratch = work.take("few", rounded * len(x) + (groups + LANES) * LANES * workers, np.float32)
    _kernel()(
        x, weight.values, weight.scales.view(np.uint16), int(depth > groups * GROUP), bias, activation, residual, out,
        workers, scratch,
    )  # fmt: skip
    return out


@cache
def _kernel() -> Any:
    def matrix(element: Any, dimensions: int = 2) -> Any:
        return types.Array(element, dimensions, "C", readonly=True, aligned=False)

    signature = types.void(
        matrix(types.float32), matrix(types.uint8), matrix(types.uint16), types.int64, matrix(types.float32, 1),
        types.int64, matrix(types.float32), types.Array(types.float32, 2, "C"), types.int64,
        types.Array(types.float32, 1, "C"),
    )  # fmt: skip
    return kernel(signature, parallel=True)(_multiply)


def _multiply(
    x: Any, weight: Any, scales: Any, group_shift: int, bias: Any, activation: int, residual: Any, out: Any,
    workers: int, scratch: Any,
) -> None:  # fmt: skip
    """The kernel. Threads take shares of the outputs, in tiles of 16. [T, in] -> [T, out]"""
    rows, outputs = out.shape
    steps = (weight.shape[1] + STEP - 1) // STEP
    groups = steps * GROUPS_A_STEP
    x_scales = scratch[: rows * groups]
    corrections = scratch[rows * groups : 2 * rows * groups].view(np.int32)
    words = 2 * rows * groups + rows * groups * GROUP // 4
    integers = scratch[2 * rows * groups : words].view(np.int8)
    gathered = scratch[words:]
    for row in range(rows):
        round_row(x, row, integers, row * groups * GROUP, groups, x_scales, corrections, row * groups)
    tiles, parts = (outputs + LANES - 1) // LANES, (rows + MOST_ROWS - 1) // MOST_ROWS
    for worker in numba.prange(workers):
        begin = tiles * worker // workers * LANES
        end = min(tiles * (worker + 1) // workers * LANES, outputs)
        start = worker * (len(gathered) // workers)
        for first in range(begin, end, LANES):
            gather_scales(scales, first, outputs - 1, gathered, start)
            for part in range(parts):
                row = rows * part // parts  # as even as can be: 9 rows are 4 and 5
                multiply_tile(
                    weight, first, outputs - 1, gathered, start, group_shift, integers, row * groups * GROUP, x_scales,
                    corrections, row * groups, steps, out, row, rows * (part + 1) // parts - row,
                )  # fmt: skip
        for row in range(rows):
            finish_row(out[row, begin:end], bias[begin:end], activation, residual[row : row + 1, begin:end])
