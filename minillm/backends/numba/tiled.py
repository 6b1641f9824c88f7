"""Products of many rows of activations with stored weights, in tiles: the loops around `avx512.py`.

From the outside in: workers, each with its share of the outputs; pieces of `columns` outputs; pieces of their inputs,
which are expanded into the worker's L2 cache; panels of 48 rows (16 with AVX2); tiles of a few outputs. The sums become
results once all inputs of a piece are done.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import types

from .arguments import flat, matrix, vector
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
from .compiling import shared_kernel
from .elementary import inner
from .expanding import expand, expand_integers
from .intrinsics import FEATURES
from .packing import finish, pack_floats, pack_integers

WIDTH = 3 * LANES if "avx512f" in FEATURES else LANES
"""Rows of a panel; the last one of a product may have fewer, 16 or 32."""
FLOAT_DEPTH = 256
INTEGER_DEPTH = 768
"""Inputs of one piece: a panel of that depth is at most 48 or 36 KB, about the size of the L1 cache."""

_LAID_OUT = 23
"""Argument number at which a product's scratch memory begins. Before it, in order: the stored weights' bytes; scales,
as `expanding.expand` takes them; kind; group; outputs; columns of one piece, a multiple of 16; rows; depth, that is
inputs rounded up for the tiles; bias, ReLU and residual, as `packing.finish` takes them; out [rows, outputs];
activations in panels. A share of the work is one piece of the outputs."""


def pieces_of(outputs: int, columns: int) -> int:
    """Number of pieces, and so shares, of a product's outputs."""
    return -(-outputs // columns)


def panels_of(rows: int) -> int:
    """Number of panels, and so shares, of the activations."""
    return -(-rows // WIDTH)


@cache
def float_packing() -> int:
    """`_pack_floats`, compiled."""
    return shared_kernel(types.float32)(_pack_floats)


@cache
def float_kernel() -> int:
    """`_multiply_floats`, compiled."""
    return shared_kernel(types.uint8)(_multiply_floats)


@cache
def integer_packing() -> int:
    """`_pack_integers`, compiled."""
    return shared_kernel(types.float32)(_pack_integers)


@cache
def integer_kernel() -> int:
    """`_multiply_integers`, compiled."""
    return shared_kernel(types.uint8)(_multiply_integers)


def _pack_floats(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """Pack one panel of x. Arguments: x [rows, inputs]; panels, float32 [rows', depth] (rows' in whole 16s); depth."""
    x, rows, inputs = flat(arguments, 0, np.float32), arguments[1], arguments[2]
    panels, depth, first = vector(arguments, 4, np.float32), arguments[6], share * WIDTH
    width = min(WIDTH, _whole(rows) - first)
    pack_floats(x, rows, inputs, 0, depth, first, width, panels, first * depth)


def _multiply_floats(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """Multiply x by weights in any format, as float32.

    Scratch memory: of each worker, tiles [columns, FLOAT_DEPTH] and sums [columns, rows'], float32.
    """
    stored, scales, kind, group, outputs, columns, rows, depth = _weights(arguments)
    panels = vector(arguments, 21, np.float32)
    tiles, sums = vector(arguments, _LAID_OUT, np.float32), vector(arguments, _LAID_OUT + 2, np.float32)
    padded, row_bytes = _whole(rows), len(stored) // outputs
    tile_at, sums_at = worker * columns * FLOAT_DEPTH, worker * columns * padded
    first, last = share * columns, min(outputs, (share + 1) * columns)
    sums[sums_at : sums_at + columns * padded] = 0
    for start in range(0, depth, FLOAT_DEPTH):
        stop = min(depth, start + FLOAT_DEPTH)
        expand(stored, row_bytes, scales, kind, group, first, last, start, stop, tiles, tile_at, FLOAT_DEPTH)
        for row in range(0, padded, WIDTH):
            _float_tiles(
                min(WIDTH, padded - row), panels, row * depth, start, tiles, tile_at, last - first, stop - start, sums,
                sums_at + row * columns,
            )  # fmt: skip
    _finish(arguments, sums, sums_at, first, last)


@inner
def _whole(rows: int) -> Any:
    """Rows rounded up to whole vectors."""
    return (rows + LANES - 1) // LANES * LANES


@inner
def _weights(arguments: Any) -> Any:
    """The arguments that both products have, from the stored weights to depth."""
    stored, scales = vector(arguments, 0, np.uint8), matrix(arguments, 2, np.uint16)
    return (
        stored, scales, arguments[6], arguments[7], arguments[8], arguments[9], arguments[10], arguments[11]
    )  # fmt: skip


@inner
def _finish(arguments: Any, sums: Any, sums_at: int, first: int, last: int) -> None:
    """Write a worker's sums of the outputs first .. last - 1 to the result."""
    outputs, columns, rows = arguments[8], arguments[9], arguments[10]
    bias, relu, residual = vector(arguments, 12, np.float32), arguments[14] != 0, vector(arguments, 15, np.float32)
    out, padded = flat(arguments, 17, np.float32), _whole(rows)
    for row in range(0, padded, WIDTH):
        finish(
            sums, sums_at + row * columns, min(WIDTH, padded - row), row, rows, first, last, bias, relu, residual, out,
            outputs,
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


def _pack_integers(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """Pack one panel of x, quantised to int8.

    Arguments: x [rows, inputs]; panels, int32 [rows', depth / 4]; depth; offsets, int32, and scales, float32 [rows',
    depth / 32]; blocks, float32 [workers, 32, 16].
    """
    x, rows, inputs = flat(arguments, 0, np.float32), arguments[1], arguments[2]
    panels, depth, first = vector(arguments, 4, np.int32), arguments[6], share * WIDTH
    offsets, scales = vector(arguments, 7, np.int32), vector(arguments, 9, np.float32)
    block = vector(arguments, 11, np.float32)[worker * GROUP * LANES : (worker + 1) * GROUP * LANES]
    pack_integers(x, rows, inputs, depth, first, min(WIDTH, _whole(rows) - first), panels, offsets, scales, block)


def _multiply_integers(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """Multiply x, quantised to int8, by int8 or int4.

    Scratch memory: offsets and scales of x; then of each worker, uint8 tiles [columns, INTEGER_DEPTH], their scales
    [columns, INTEGER_DEPTH / 32] and sums [columns, rows'].
    """
    stored, scales, kind, group, outputs, columns, rows, depth = _weights(arguments)
    panels, offsets = vector(arguments, 21, np.int32), vector(arguments, _LAID_OUT, np.int32)
    row_scales, tiles = vector(arguments, _LAID_OUT + 2, np.float32), vector(arguments, _LAID_OUT + 4, np.uint8)
    tile_scales, sums = (
        vector(arguments, _LAID_OUT + 6, np.float32),
        vector(arguments, _LAID_OUT + 8, np.float32),
    )
    padded, row_bytes = _whole(rows), len(stored) // outputs
    tile_at, sums_at = worker * columns * INTEGER_DEPTH, worker * columns * padded
    scales_at = worker * columns * (INTEGER_DEPTH // GROUP)
    first, last = share * columns, min(outputs, (share + 1) * columns)
    sums[sums_at : sums_at + columns * padded] = 0
    for start in range(0, depth, INTEGER_DEPTH):
        stop = min(depth, start + INTEGER_DEPTH)
        expand_integers(
            stored, row_bytes, scales, kind, group, first, last, start, stop, tiles, tile_at, INTEGER_DEPTH,
            tile_scales, scales_at,
        )  # fmt: skip
        for row in range(0, padded, WIDTH):
            _integer_tiles(
                min(WIDTH, padded - row), panels, row * (depth // 4), offsets, row_scales, row * (depth // GROUP),
                start, tiles, tile_at, tile_scales, scales_at, last - first, (stop - start) // GROUP, sums,
                sums_at + row * columns,
            )  # fmt: skip
    _finish(arguments, sums, sums_at, first, last)


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
