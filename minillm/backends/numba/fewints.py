"""y = activation(x W^T + b) + residual for 1 to 16 rows on int4, by integer dot products, if the CPU has VNNI.

Rows are rounded to int8 first. Results are bit-identical to those of `manyrows.linear_many`, for any number of rows and
threads.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from ...reference.quantize import Quantized
from .activations import finish_row
from .arguments import flat, matrix, share_of, vector
from .avx512 import GROUP, LANES
from .compiling import num_threads, shared_kernel
from .integer_rows import GROUPS_A_STEP, STEP, gather_scales, multiply_tile, round_row
from .launching import launch, scratch, shares_of
from .tiles import MOST_ROWS


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
        bias: [out], or empty
        out: [T, out], filled and returned
        activation: one of `ACTIVATION_CODES`
        residual: [T, out], or empty
    """
    rows, groups = len(x), weight.scales.shape[1]
    depth = 2 * weight.values.shape[1]
    padded = -(-weight.values.shape[1] // STEP) * GROUPS_A_STEP  # groups of 32 inputs, in whole steps
    space, workers = scratch(), num_threads()
    integers = space.rows("few integers", rows, padded * GROUP, np.int8)
    row_scales = space.rows("few scales", rows, padded, np.float32)
    corrections = space.rows("few corrections", rows, padded, np.int32)
    gathered = space.rows("few gathered", workers, (groups + LANES) * LANES, np.float32).reshape(-1)
    launch(_round_kernel(), x, integers, row_scales, corrections, shares=1 if rows == 1 else shares_of(rows))
    launch(
        _kernel(), weight.values, weight.scales.view(np.uint16), int(depth > groups * GROUP), integers, row_scales,
        corrections, bias, activation, residual, out, gathered, workers,
        shares=shares_of(-(-len(weight.values) // LANES)),
    )  # fmt: skip
    return out


@cache
def _round_kernel() -> int:
    return shared_kernel(types.float32)(_round)


@cache
def _kernel() -> int:
    return shared_kernel(types.uint8)(_multiply)


def _round(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """Round a share of the rows of x to integers, with the scales and corrections of their groups. [T, in]"""
    x, integers = matrix(arguments, 0, np.float32), flat(arguments, 4, np.int8)
    scales, corrections, groups = flat(arguments, 8, np.float32), flat(arguments, 12, np.int32), arguments[14]
    first, stop = share_of(len(x), share, shares)
    for row in range(first, stop):
        round_row(x, row, integers, row * groups * GROUP, groups, scales, corrections, row * groups)


def _multiply(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """Compute a share of the outputs, in tiles of 16. [T, in] -> [T, out]"""
    weight = carray(data, (arguments[1], arguments[2]))
    scales, group_shift = matrix(arguments, 4, np.uint16), arguments[8]
    integers, x_scales = flat(arguments, 9, np.int8), flat(arguments, 13, np.float32)
    corrections, groups = flat(arguments, 17, np.int32), arguments[15]
    bias, activation, residual = vector(arguments, 21, np.float32), arguments[23], matrix(arguments, 24, np.float32)
    out, gathered = matrix(arguments, 28, np.float32), vector(arguments, 32, np.float32)
    steps = groups // GROUPS_A_STEP
    rows, outputs = out.shape
    start = worker * (len(gathered) // arguments[34])
    parts = (rows + MOST_ROWS - 1) // MOST_ROWS
    first_tile, last_tile = share_of((outputs + LANES - 1) // LANES, share, shares)
    begin, end = first_tile * LANES, min(last_tile * LANES, outputs)
    for first in range(begin, end, LANES):
        gather_scales(scales, first, outputs - 1, gathered, start)
        for part in range(parts):
            row = rows * part // parts  # as even as possible: 9 rows are 4 and 5
            multiply_tile(
                weight, first, outputs - 1, gathered, start, group_shift, integers, row * groups * GROUP, x_scales,
                corrections, row * groups, steps, out, row, rows * (part + 1) // parts - row,
            )  # fmt: skip
    for row in range(rows):
        finish_row(out[row, begin:end], bias[begin:end], activation, residual[row : row + 1, begin:end])
