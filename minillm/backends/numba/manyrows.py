"""Products of many rows of activations (prefill) with weights in every stored format.

No second copy of the weights is made. Each thread takes a share of the outputs, some columns at a time; it expands a
piece of those weights, columns x depth, into its own work space in the second-level cache and multiplies it by all
rows, tile by tile (`avx512.py`). float32, float16 and bfloat16 are multiplied as float32: products are exact and sums
float32. int8 and int4 are multiplied as integers where the CPU has VNNI, with activations quantised to int8 in groups
of 32, and else as float32. Without AVX-512 the pieces are expanded and multiplied by NumPy's BLAS.

A result depends on its row and its weights alone: not on the number of rows or threads.
"""

import threading
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from ...ops.activation import ACTIVATIONS
from . import avx512
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
from .expanding import BFLOAT16, FLOAT16, FLOAT32, SIGNED4, SIGNED8, expand, expand_integers
from .packing import finish, pack_floats, pack_integers

WIDTH = 3 * LANES
"""Rows of a panel; the last one of a product may have 16 or 32."""
MOST_ROWS = 11 * WIDTH
"""Rows of one pass over the weights: their sums lie in the second-level cache."""
COLUMNS = 96
"""Outputs of one piece of weights, at most."""
FLOAT_DEPTH = 192
"""Inputs of one piece: a panel of that depth, 36 KB, fits the first-level cache of today's CPUs."""
INTEGER_DEPTH = 384

_KINDS = {"float32": FLOAT32, "float16": FLOAT16, "uint16": BFLOAT16, "int8": SIGNED8, "uint8": SIGNED4}


class _WorkSpace(threading.local):
    """Arrays that products work in, kept from one call to the next, for each of Python's threads."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}

    def take(self, name: str, size: int, dtype: Any) -> NDArray[Any]:
        """A flat array of at least `size` elements."""
        array = self.arrays.get(name)
        if array is None or len(array) < size:
            array = self.arrays[name] = np.empty(size, dtype)
        return array


_work = _WorkSpace()


def linear_many(
    x: NDArray[np.float32],
    values: NDArray[Any],
    out: NDArray[np.float32],
    *,
    scales: NDArray[np.float16] | None = None,
    bias: NDArray[np.float32] | None = None,
    activation: str | None = None,
    residual: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """y = activation(x W^T + b) + residual (see `ops.linear`), for W as it is stored.

    Args:
        x: [T, in], contiguous
        values: [out, in] in float32, float16 or, as uint16, bfloat16; [out, in'] int8 or [out, in' / 2] uint8 (int4),
            where in' is `in` padded to whole groups (see `ops.quantize`)
        out: [T, out], contiguous, filled and returned
        scales: [out, in' / group] of int8 and int4; group is 32 or 64
        bias: [out] or None
        activation: a name in `ops.ACTIVATIONS`, or None
        residual: [T, out] or None; left as it is, and not `out`
    """
    kind = _KINDS[values.dtype.name]
    if not len(x):
        return out
    fused = activation in (None, "relu")
    inside = residual if fused else None
    if avx512.HAS_FLOAT_TILES:
        by_integers = kind >= SIGNED8 and avx512.HAS_INTEGER_TILES
        multiply = _multiply_integers if by_integers else _multiply_floats
        passes = -(-len(x) // MOST_ROWS)
        step = -(-len(x) // (passes * WIDTH)) * WIDTH
        for first in range(0, len(x), step):
            part = slice(first, first + step)
            added = _ZEROS if inside is None else inside[part].reshape(-1)
            multiply(x[part], values, kind, scales, bias, activation == "relu", added, out[part].reshape(-1))
    else:
        _multiply_by_blas(x, values, kind, scales, bias, out)
        fused = False
    if not fused:
        if activation is not None:
            ACTIVATIONS[activation](out, np)
        if residual is not None:
            out += residual
    return out


_ZEROS, _NO_SCALES = np.zeros(LANES, np.float32), np.empty((1, 0), np.uint16)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view that may not be written to: what is mapped from a file and what is not are then one type to Numba."""
    view = array.view()
    view.flags.writeable = False
    return view


def _operands(values: Any, kind: int, scales: Any, bias: Any) -> tuple[Any, Any, int, int, Any]:
    """Stored bytes, scales, inputs that share one, stored inputs, bias."""
    stored = _read_only(values).view(np.uint8).reshape(-1)  # [out, in] -> [bytes]
    inputs = values.shape[1] * 2 if kind == SIGNED4 else values.shape[1]
    bits = _NO_SCALES if scales is None else scales.view(np.uint16)
    group = GROUP if scales is None else inputs // scales.shape[1]
    return stored, _read_only(bits), group, inputs, _read_only(_ZEROS if bias is None else bias)


def _columns(outputs: int, workers: int) -> int:
    """Outputs of one piece, so that every worker has some."""
    return min(COLUMNS, -(-outputs // (workers * LANES)) * LANES)


def _multiply_floats(
    x: Any, values: Any, kind: int, scales: Any, bias: Any, relu: bool, residual: Any, out: Any
) -> None:
    """x [rows, in] by `values` in any format, with the tiles of float32."""
    stored, bits, group, inputs, bias = _operands(values, kind, scales, bias)
    workers = numba.get_num_threads()
    columns = _columns(len(values), workers)
    rows = -(-len(x) // LANES) * LANES
    depth = -(-inputs // LANES) * LANES
    _float_product(
        x.reshape(-1), len(x), x.shape[1], depth, stored, len(values), bits, kind, group, bias, relu, residual, out, columns, workers,
        _work.take("panels", rows * depth, np.float32),
        _work.take("tiles", workers * columns * FLOAT_DEPTH, np.float32),
        _work.take("sums", workers * columns * rows, np.float32),
        _work.take("blocks", workers * GROUP * LANES, np.float32),
    )  # fmt: skip


def _multiply_integers(
    x: Any, values: Any, kind: int, scales: Any, bias: Any, relu: bool, residual: Any, out: Any
) -> None:
    """x [rows, in] by int8 or int4, with the tiles of integers."""
    stored, bits, group, inputs, bias = _operands(values, kind, scales, bias)
    workers = numba.get_num_threads()
    columns = _columns(len(values), workers)
    rows = -(-len(x) // LANES) * LANES
    _integer_product(
        x.reshape(-1), len(x), x.shape[1], inputs, stored, len(values), bits, kind, group, bias, relu, residual, out,
        columns, workers,
        _work.take("integer panels", rows * inputs // 4, np.int32),
        _work.take("offsets", rows * inputs // GROUP, np.int32),
        _work.take("scales", rows * inputs // GROUP, np.float32),
        _work.take("integer tiles", workers * columns * INTEGER_DEPTH, np.uint8),
        _work.take("tile scales", workers * columns * (INTEGER_DEPTH // GROUP), np.float32),
        _work.take("sums", workers * columns * rows, np.float32),
        _work.take("blocks", workers * GROUP * LANES, np.float32),
    )  # fmt: skip


@kernel(parallel=True)
def _float_product(
    x: Any, rows: int, inputs: int, depth: int, stored: Any, outputs: int, scales: Any, kind: int, group: int, bias: Any, relu: bool,
    residual: Any, out: Any, columns: int, workers: int, panels: Any, tiles: Any, sums: Any, blocks: Any,
) -> None:  # fmt: skip
    padded = (rows + LANES - 1) // LANES * LANES
    for block in numba.prange((padded + WIDTH - 1) // WIDTH):
        width = min(WIDTH, padded - block * WIDTH)
        pack_floats(x, rows, inputs, 0, depth, block * WIDTH, width, panels, block * WIDTH * depth)
    row_bytes = len(stored) // outputs
    pieces = (outputs + columns - 1) // columns
    for worker in numba.prange(workers):
        tile_at, sums_at = worker * columns * FLOAT_DEPTH, worker * columns * padded
        block = blocks[worker * GROUP * LANES : (worker + 1) * GROUP * LANES]
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
                    sums, sums_at + row * columns, min(WIDTH, padded - row), block, row, rows, first, last, bias, relu,
                    residual, out, outputs,
                )  # fmt: skip


@kernel()
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


@kernel(parallel=True)
def _integer_product(
    x: Any, rows: int, inputs: int, depth: int, stored: Any, outputs: int, scales: Any, kind: int, group: int,
    bias: Any, relu: bool, residual: Any, out: Any, columns: int, workers: int, panels: Any, offsets: Any,
    row_scales: Any, tiles: Any, tile_scales: Any, sums: Any, blocks: Any,
) -> None:  # fmt: skip
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
        block = blocks[worker * GROUP * LANES : (worker + 1) * GROUP * LANES]
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
                    sums, sums_at + row * columns, min(WIDTH, padded - row), block, row, rows, first, last, bias, relu,
                    residual, out, outputs,
                )  # fmt: skip


@kernel()
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
