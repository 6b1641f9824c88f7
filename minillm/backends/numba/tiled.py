"""Products of many rows of activations with stored weights, in tiles: the loops around `avx512.py`.

From the outside in: workers, each with its share of the outputs; pieces of `columns` outputs; pieces of their inputs,
which are expanded into the worker's second-level cache; panels of 48 rows; tiles of a few outputs. What a worker's
rows have gathered becomes results when all inputs of a piece are through.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
from numba import types

from .avx512 import (
    FLOAT_OUTPUTS,
    GROUP,
    INTEGER_OUTPUTS,
    LANES,
    float_tile_16,
    float_tile_32,
    float_tile_48,
    integer_tile_16,
    integer_tile_32,
    integer_tile_48,
)
from .compiling import kernel
from .elementary import inner
from .expanding import expand, expand_integers
from .packing import finish, pack_floats, pack_integers

WIDTH = 3 * LANES
"""Rows of a panel; the last one of a product may have 16 or 32."""
FLOAT_DEPTH = 256
INTEGER_DEPTH = 768
"""Inputs of one piece: a panel of that depth is 48 or 36 KB, about what the first-level cache holds."""

_WHOLE = types.int64
_FLOATS, _INTEGERS, _BYTES = (types.Array(kind, 1, "C") for kind in (types.float32, types.int32, types.uint8))
_OPERANDS = (
    _FLOATS, _WHOLE, _WHOLE, _WHOLE, _BYTES, _WHOLE, types.Array(types.uint16, 2, "C"), _WHOLE, _WHOLE,
    _FLOATS, types.boolean, _FLOATS, _FLOATS, _WHOLE, _WHOLE,
)  # fmt: skip
"""From x to workers: what both products take alike."""


@cache
def float_kernel() -> Callable[..., None]:
    """`float_product`, compiled."""
    return kernel(types.void(*_OPERANDS, _FLOATS, _FLOATS, _FLOATS), parallel=True)(float_product)


@cache
def integer_kernel() -> Callable[..., None]:
    """`integer_product`, compiled."""
    work = _INTEGERS, _INTEGERS, _FLOATS, _BYTES, _FLOATS, _FLOATS, _FLOATS
    return kernel(types.void(*_OPERANDS, *work), parallel=True)(integer_product)


def float_product(
    x: Any, rows: int, inputs: int, depth: int, stored: Any, outputs: int, scales: Any, kind: int, group: int,
    bias: Any, relu: bool, residual: Any, out: Any, columns: int, workers: int, panels: Any, tiles: Any, sums: Any,
) -> None:  # fmt: skip
    """x by weights in any format as float32. Flat arrays, except out' x groups of `scales`.

    Args:
        x: float32 [rows, inputs]
        rows: at least 1
        inputs: of x
        depth: the larger of `inputs` and the stored inputs, rounded up to a multiple of 16
        stored: uint8: the weights of `outputs` outputs (see `expanding.expand`)
        outputs: at least 1
        scales: see `expanding.expand`
        kind: see `expanding.expand`
        group: see `expanding.expand`
        bias: see `packing.finish`
        relu: see `packing.finish`
        residual: see `packing.finish`
        out: float32 [rows, outputs], filled
        columns: outputs of one piece, a multiple of 16
        workers: shares that the work is cut into
        panels: work space, float32 [rows', depth]; rows' is `rows` rounded up to a multiple of 16
        tiles: work space, float32 [workers, columns, FLOAT_DEPTH]
        sums: work space, float32 [workers, columns, rows']
    """
    padded = (rows + LANES - 1) // LANES * LANES
    for block in numba.prange((padded + WIDTH - 1) // WIDTH):
        width = min(WIDTH, padded - block * WIDTH)
        pack_floats(x, rows, inputs, 0, depth, block * WIDTH, width, panels, block * WIDTH * depth)
    row_bytes = len(stored) // outputs
    pieces = (outputs + columns - 1) // columns
    for worker in numba.prange(workers):
        tile_at, sums_at = worker * columns * FLOAT_DEPTH, worker * columns * padded
        for piece in range(pieces * worker // workers, pieces * (worker + 1) // workers):
            first, last = piece * columns, min(outputs, (piece + 1) * columns)
            sums[sums_at : sums_at + columns * padded] = 0
            for start in range(0, depth, FLOAT_DEPTH):
                stop = min(depth, start + FLOAT_DEPTH)
                expand(stored, row_bytes, scales, kind, group, first, last, start, stop, tiles, tile_at, FLOAT_DEPTH)
                for row in range(0, padded, WIDTH):
                    _float_tiles(
                        min(WIDTH, padded - row), panels, row * depth, start, tiles, tile_at, last - first,
                        stop - start, sums, sums_at + row * columns,
                    )  # fmt: skip
            for row in range(0, padded, WIDTH):
                finish(
                    sums, sums_at + row * columns, min(WIDTH, padded - row), row, rows, first, last, bias, relu,
                    residual, out, outputs,
                )  # fmt: skip


@inner
def _float_tiles(
    width: int, panels: Any, panel: int, start: int, tiles: Any, tile: int, count: int, depth: int, sums: Any, at: int
) -> None:
    """Sums [outputs, width] += weights [outputs, depth] by the panel [depth, width] from its input `start` on."""
    panel += start * width
    for n in range(0, count, FLOAT_OUTPUTS):
        place, target = tile + n * FLOAT_DEPTH, at + n * width
        if width == 48:
            float_tile_48(panels, panel, tiles, place, FLOAT_DEPTH, depth, sums, target)
        elif width == 32:
            float_tile_32(panels, panel, tiles, place, FLOAT_DEPTH, depth, sums, target)
        else:
            float_tile_16(panels, panel, tiles, place, FLOAT_DEPTH, depth, sums, target)


def integer_product(
    x: Any, rows: int, inputs: int, depth: int, stored: Any, outputs: int, scales: Any, kind: int, group: int,
    bias: Any, relu: bool, residual: Any, out: Any, columns: int, workers: int, panels: Any, offsets: Any,
    row_scales: Any, tiles: Any, tile_scales: Any, sums: Any, blocks: Any,
) -> None:  # fmt: skip
    """x quantised to int8, by int8 or int4. As `float_product`, but for `depth` and the work space.

    Args:
        x: float32 [rows, inputs]
        rows: at least 1
        inputs: of x
        depth: the stored inputs, a multiple of 32
        stored: uint8: the weights of `outputs` outputs (see `expanding.expand`)
        outputs: at least 1
        scales: see `expanding.expand`
        kind: see `expanding.expand`
        group: see `expanding.expand`
        bias: see `packing.finish`
        relu: see `packing.finish`
        residual: see `packing.finish`
        out: float32 [rows, outputs], filled
        columns: outputs of one piece, a multiple of 16
        workers: shares that the work is cut into
        panels: work space, int32 [rows', depth / 4]
        offsets: work space, int32 [rows', depth / 32]
        row_scales: work space, float32 [rows', depth / 32]
        tiles: work space, uint8 [workers, columns, INTEGER_DEPTH]
        tile_scales: work space, float32 [workers, columns, INTEGER_DEPTH / 32]
        sums: work space, float32 [workers, columns, rows']
        blocks: work space, float32 [workers, 32, 16]
    """
    padded = (rows + LANES - 1) // LANES * LANES
    count = (padded + WIDTH - 1) // WIDTH
    for worker in numba.prange(workers):
        block = blocks[worker * GROUP * LANES : (worker + 1) * GROUP * LANES]
        for i in range(count * worker // workers, count * (worker + 1) // workers):
            width = min(WIDTH, padded - i * WIDTH)
            pack_integers(x, rows, inputs, depth, i * WIDTH, width, panels, offsets, row_scales, block)
    row_bytes = len(stored) // outputs
    pieces = (outputs + columns - 1) // columns
    for worker in numba.prange(workers):
        tile_at, sums_at = worker * columns * INTEGER_DEPTH, worker * columns * padded
        scales_at = worker * columns * (INTEGER_DEPTH // GROUP)
        for piece in range(pieces * worker // workers, pieces * (worker + 1) // workers):
            first, last = piece * columns, min(outputs, (piece + 1) * columns)
            sums[sums_at : sums_at + columns * padded] = 0
            for start in range(0, depth, INTEGER_DEPTH):
                stop = min(depth, start + INTEGER_DEPTH)
                expand_integers(
                    stored, row_bytes, scales, kind, group, first, last, start, stop, tiles, tile_at, INTEGER_DEPTH,
                    tile_scales, scales_at,
                )  # fmt: skip
                for row in range(0, padded, WIDTH):
                    _integer_tiles(
                        min(WIDTH, padded - row), panels, row * (depth // 4), offsets, row_scales,
                        row * (depth // GROUP), start, tiles, tile_at, tile_scales, scales_at, last - first,
                        (stop - start) // GROUP, sums, sums_at + row * columns,
                    )  # fmt: skip
            for row in range(0, padded, WIDTH):
                finish(
                    sums, sums_at + row * columns, min(WIDTH, padded - row), row, rows, first, last, bias, relu,
                    residual, out, outputs,
                )  # fmt: skip


@inner
def _integer_tiles(
    width: int, panels: Any, panel: int, offsets: Any, row_scales: Any, group: int, start: int, tiles: Any, tile: int,
    tile_scales: Any, scale: int, count: int, groups: int, sums: Any, at: int,
) -> None:  # fmt: skip
    """As `_float_tiles`, in groups of 32 inputs."""
    panel += start // 4 * width
    group += start // GROUP * width
    stride = INTEGER_DEPTH // GROUP
    for n in range(0, count, INTEGER_OUTPUTS):
        place, scale_place, target = tile + n * INTEGER_DEPTH, scale + n * stride, at + n * width
        if width == 48:
            integer_tile_48(
                panels, panel, offsets, row_scales, group, tiles, place, INTEGER_DEPTH, tile_scales, scale_place,
                stride, groups, sums, target,
            )  # fmt: skip
        elif width == 32:
            integer_tile_32(
                panels, panel, offsets, row_scales, group, tiles, place, INTEGER_DEPTH, tile_scales, scale_place,
                stride, groups, sums, target,
            )  # fmt: skip
        else:
            integer_tile_16(
                panels, panel, offsets, row_scales, group, tiles, place, INTEGER_DEPTH, tile_scales, scale_place,
                stride, groups, sums, target,
            )  # fmt: skip
