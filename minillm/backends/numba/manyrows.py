"""Products of many rows of activations (prefill) with weights in every stored format.

No second copy of the weights is made. Each thread takes a share of the outputs, some columns at a time; it expands a
piece of those weights, columns x depth, into its own scratch memory in the L2 cache and multiplies it by all rows, tile
by tile (`tiled.py`). float32, float16 and bfloat16 are multiplied as float32: products are exact and sums float32. int8
and int4 are multiplied as integers if the CPU has VNNI, with activations quantised to int8 in groups of 32 as in
llama.cpp's Q8_0, and else as float32. So a result depends on its row and its weights alone, not on the number of rows
or threads. Without AVX-512 and AVX2, NumPy's BLAS multiplies the pieces.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from ...reference.quantize import Quantized
from . import avx512
from .arguments import matrix, share_of, vector
from .avx512 import GROUP, LANES
from .compiling import num_threads, shared_kernel
from .expanding import BFLOAT16, FLOAT16, FLOAT32, SIGNED4, SIGNED8, expand
from .launching import launch, not_recorded, shares_of
from .rows import finish
from .tiled import (
    FLOAT_DEPTH,
    INTEGER_DEPTH,
    WIDTH,
    float_kernel,
    float_packing,
    integer_kernel,
    integer_packing,
    panels_of,
    pieces_of,
)
from .workspace import work

MOST_ROWS = 33 * LANES
"""Rows of one pass over the weights: their sums fit into the L2 cache."""
COLUMNS = 128
"""The most outputs of one piece of weights."""
EXPANDED = 1 << 20
"""Weights that are expanded at once for BLAS."""

_KINDS = {"float32": FLOAT32, "float16": FLOAT16, "uint16": BFLOAT16, "int8": SIGNED8, "uint8": SIGNED4}


def linear_many(
    x: NDArray[np.float32],
    weight: NDArray[Any] | Quantized,
    bias: NDArray[np.float32] | None,
    out: NDArray[np.float32],
    *,
    activation: str | None = None,
    residual: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """y = activation(x W^T + b) + residual, as `reference.linear`. All arrays are C-contiguous.

    Meant for 17 rows and more; correct for fewer, but slower than `fewrows.linear_few`.

    Args:
        x: [T, in]
        weight: [out, in] float32, float16, or bfloat16 as its bits in uint16; or `Quantized`
        bias: [out] or None
        out: [T, out], filled and returned; must not overlap x or residual
        activation: a key of `activations.ACTIVATION_CODES`
        residual: [T, out] or None; not changed
    """
    not_recorded()
    stored = _Stored.of(weight)
    fused = avx512.HAS_FLOAT_TILES and activation in (None, "relu")
    if avx512.HAS_FLOAT_TILES:
        multiply = _multiply_integers if stored.kind >= SIGNED8 and avx512.HAS_INTEGER_TILES else _multiply_floats
        added = residual if fused else None
        step = _rows_of_a_pass(len(x))
        for first in range(0, len(x), step):
            part = slice(first, first + step)
            epilogue = (
                _ZEROS if bias is None else bias,
                fused and activation == "relu",
                _ZEROS if added is None else added[part].reshape(-1),
            )
            multiply(x[part], stored, epilogue, out[part])
        bias = None  # the tiles have added it
    else:
        _multiply_by_blas(x, stored, out)
    return out if fused else finish(out, bias, activation, residual)


class _Stored(NamedTuple):
    """A weight in the form that kernels take."""

    values: NDArray[Any]
    """[out, in], [out, in'] or [out, in' / 2], as `reference.quantize` says"""
    kind: int
    flat: NDArray[np.uint8]
    """all bytes of `values`"""
    scales: NDArray[np.uint16]
    """float16's bits [out, in' / group]"""
    group: int
    inputs: int
    """in', or in if nothing is padded"""

    @staticmethod
    def of(weight: NDArray[Any] | Quantized) -> "_Stored":
        if isinstance(weight, Quantized):
            values, scales, group = weight.values, weight.scales.view(np.uint16), weight.group
        else:
            values, scales, group = weight, _NO_SCALES, GROUP
        kind = _KINDS[values.dtype.name]
        flat = values.view(np.uint8).reshape(-1)  # [out, in] -> [bytes]
        return _Stored(values, kind, flat, scales, group, values.shape[1] * (2 if kind == SIGNED4 else 1))


_ZEROS, _NO_SCALES = np.zeros(LANES, np.float32), np.empty((1, 0), np.uint16)
_Epilogue = tuple[NDArray[np.float32], bool, NDArray[np.float32]]
"""Bias, whether ReLU follows, residual; `_ZEROS` where there is no bias or residual."""


def _rows_of_a_pass(rows: int) -> int:
    """Rows of one pass over the weights: passes are of equal size, and their sums fit into the cache."""
    passes = max(1, -(-rows // MOST_ROWS))
    return max(1, -(-rows // (passes * WIDTH))) * WIDTH


def _columns(outputs: int, workers: int) -> int:
    """Outputs of one piece: the same number of pieces for each worker, as large as `COLUMNS` allows."""
    pieces = -(-outputs // (workers * COLUMNS)) * workers
    return -(-outputs // (pieces * LANES)) * LANES


def _multiply_floats(x: Any, weight: _Stored, epilogue: _Epilogue, out: Any) -> None:
    """Multiply x [rows, in] by weights in any format, with the tiles of float32."""
    workers, outputs = num_threads(), len(weight.values)
    columns = _columns(outputs, workers)
    padded, depth = (-(-size // LANES) * LANES for size in (len(x), weight.inputs))
    panels = work.take("panels", padded * depth, np.float32)
    launch(float_packing(), x, panels, depth, shares=panels_of(len(x)))
    launch(
        float_kernel(), weight.flat, weight.scales, weight.kind, weight.group, outputs, columns, len(x), depth,
        *epilogue, out, panels,
        work.take("tiles", workers * columns * FLOAT_DEPTH, np.float32),
        work.take("sums", workers * columns * padded, np.float32),
        shares=pieces_of(outputs, columns),
    )  # fmt: skip


def _multiply_integers(x: Any, weight: _Stored, epilogue: _Epilogue, out: Any) -> None:
    """Multiply x [rows, in] by int8 or int4, with the tiles of integers."""
    workers, outputs = num_threads(), len(weight.values)
    columns = _columns(outputs, workers)
    padded, depth = -(-len(x) // LANES) * LANES, weight.inputs
    panels = work.take("integer panels", padded * depth // 4, np.int32)
    laid_out = (
        work.take("offsets", padded * depth // GROUP, np.int32),
        work.take("scales", padded * depth // GROUP, np.float32),
    )
    blocks = work.take("blocks", workers * GROUP * LANES, np.float32)
    launch(integer_packing(), x, panels, depth, *laid_out, blocks, shares=panels_of(len(x)))
    launch(
        integer_kernel(), weight.flat, weight.scales, weight.kind, weight.group, outputs, columns, len(x), depth,
        *epilogue, out, panels, *laid_out,
        work.take("integer tiles", workers * columns * INTEGER_DEPTH, np.uint8),
        work.take("tile scales", workers * columns * (INTEGER_DEPTH // GROUP), np.float32),
        work.take("sums", workers * columns * padded, np.float32),
        shares=pieces_of(outputs, columns),
    )  # fmt: skip


def _multiply_by_blas(x: Any, weight: _Stored, out: Any) -> None:
    """Multiply x [T, in] by weights in any format, some outputs at a time expanded to float32."""
    if weight.kind == FLOAT32:
        np.matmul(x, weight.values.T, out=out)
        return
    outputs, depth = len(weight.values), weight.inputs
    rows = max(1, EXPANDED // max(1, depth))
    tile = work.take("expanded", min(rows, outputs) * depth, np.float32)
    for first in range(0, outputs, rows):
        last = min(outputs, first + rows)
        launch(
            _expand_kernel(), weight.flat, weight.scales, weight.kind, weight.group, outputs, first, last, depth, tile,
            shares=shares_of(last - first),
        )  # fmt: skip
        part = tile[: (last - first) * depth].reshape(-1, depth)[:, : x.shape[1]]
        np.matmul(x, part.T, out=out[:, first:last])  # [T, in] x [in, n] -> [T, n]


@cache
def _expand_kernel() -> int:
    return shared_kernel(types.uint8)(_expand_rows)


def _expand_rows(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """Expand a share of the outputs first .. last - 1 into a tile [last - first, depth]."""
    stored, scales = vector(arguments, 0, np.uint8), matrix(arguments, 2, np.uint16)
    kind, group, outputs, first, last = arguments[6], arguments[7], arguments[8], arguments[9], arguments[10]
    depth, tile = arguments[11], vector(arguments, 12, np.float32)
    begin, end = share_of(last - first, share, shares)
    expand(
        stored, len(stored) // outputs, scales, kind, group, first + begin, first + end, 0, depth, tile, begin * depth,
        depth,
    )  # fmt: skip
