"""Matrices of 8 and 4 bits on a GPU: the order of their bytes, their rows as 16-bit numbers, and the shape of products.

`reference/quantize.py` says what they are, `kernels/cuda/integers.cuh` in which order the device has their bytes:
`interleave` changes it when they are sent, and all kernels read them so.
"""

from typing import Any, NamedTuple

import numpy as np

from ...reference.quantize import Quantized
from .kernels import Kernels, int32s, or_null

CHUNK_BYTES = 64
"""Part of a row of W that a block has in a stage"""
MOST_OUTS = 128
WARPS = 8
"""The warps of a block for more than 4 rows"""
FEW_WARPS = 16
"""The warps that a processor has for up to 4 rows. A block has 4, 8 or 16, so that all blocks run at once"""
FEW_NUMBERS = 256
"""Numbers of a row of W that one of these has in flight, at the least"""
SHARED = 160 << 10
"""Bytes of shared memory of a processor for all stages of its blocks"""
LESS_SHARED = dict.fromkeys((86, 89, 120, 121), 96 << 10)
"""The same where there is less, by compute capability"""
MOST_STAGES = 4


class IntegerShape(NamedTuple):
    """The constants of `kernels/cuda/gemv_integers.cuh` that the shape of a product decides."""

    ROWS: int
    """Rows of x that a block multiplies at a time"""
    OUTS: int
    """Rows of W of a block"""
    SPLITS: int
    """Parts of a row of W, each of other warps"""
    STAGES: int
    """Copies of a part of W and of x, of which one is multiplied while the others are filled"""

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.SPLITS * _wide(self.OUTS)

    def shared(self, matrix: Quantized) -> int:
        """Bytes of shared memory of a block."""
        return self.STAGES * self.SPLITS * _part(self.ROWS, self.OUTS, matrix.bits)


def integer_shape(kernels: Kernels, matrix: Quantized, rows: int, outputs: int) -> IntegerShape:
    """The shape for a product with `outputs` rows of a matrix, at once.

    Up to 4 rows, where x is small: 16 outputs a block, as few warps as have a whole row of W in flight, and no more
    than leave all blocks on the processors at once. More rows: as many outputs as let the busiest processor be sent
    the least, of W and of x.
    """
    processors, inputs, bits = kernels.processors, matrix.shape[1], matrix.bits
    chunks = ceil(inputs, CHUNK_BYTES * 8 // bits)
    if rows <= 4:
        most, outs, resident = 4, 16, 1
        room = FEW_WARPS * processors // ceil(outputs, outs)
        splits = max(4, min(16, power_of_two(ceil(inputs, FEW_NUMBERS)), power_of_two(room + 1) // 2))
        resident = FEW_WARPS // splits
    else:
        crowded = matrix.group == 16 or matrix.offsets is not None  # 64 rows leave no registers
        most = min(max(power_of_two(rows), 8), 32 if crowded else 64)

        def sent(outs: int) -> int:
            """Eighths of a byte for each number of a row, to the busiest processor."""
            return ceil(ceil(outputs, outs), processors) * (outs * bits + 16 * most)

        outs = min((MOST_OUTS, 64, 32, 16), key=sent)
        splits = min(WARPS // _wide(outs), power_of_two(chunks))
        resident = 2 if most <= 8 else 1
    room = LESS_SHARED.get(kernels.architecture, SHARED)
    while splits > 1 and 2 * splits * _part(most, outs, bits) > room:
        splits //= 2
    stages = room // resident // (splits * _part(most, outs, bits))
    return IntegerShape(most, outs, splits, max(2, min(MOST_STAGES, stages)))


def integer_constants(matrix: Quantized) -> dict[str, int]:
    """The macros of `kernels/cuda/integers.cuh` for a matrix."""
    offset_bits = 0 if matrix.offsets is None else 8 * int(matrix.offsets.dtype.itemsize)
    return {"BITS": matrix.bits, "GROUP": matrix.group, "OFFSETS": offset_bits}


def interleave(kernels: Kernels, matrix: Quantized) -> None:
    """Change the order of a matrix's bytes, in place, from that of files to that of the device.

    Args:
        kernels: of any storage type of 16 bits
        matrix: its arrays on the device, contiguous
    """
    rows, row_bytes = matrix.values.shape
    if rows == 0 or row_bytes == 0:
        return
    chunks = ceil(row_bytes, CHUNK_BYTES)
    threads = min(256, 32 * ceil(chunks, 32))
    kernel = kernels.get("expand", "interleave", **integer_constants(matrix))
    kernel((rows, ceil(chunks, threads)), (threads,), (matrix.values.view(np.uint8), np.int32(row_bytes)))


def expand(
    kernels: Kernels,
    matrix: Quantized,
    out: Any,
    *,
    ids: Any | None = None,
    position_table: Any | None = None,
    positions: Any | None = None,
    scale: float = 1.0,
) -> None:
    """out = scale * matrix[ids], plus position_table[positions] where that is given.

    Args:
        kernels: for the storage type of `out`, of 16 bits
        matrix: [V, E], of 8 or 4 bits, its arrays on the device
        out: [T, E], contiguous
        ids: [T] int32; None: the first T rows
        position_table: [positions, E], contiguous, of `out`'s type
        positions: [T] int32
        scale: factor of the matrix's rows
    """
    T, E = out.shape
    if T == 0:
        return
    vectors = ceil(E, 16 // out.dtype.itemsize)
    threads = min(256, 32 * ceil(vectors, 32))
    arrays = (or_null(each) for each in (matrix.offsets, ids, position_table, positions))
    sizes = E, len(matrix.scales), 0 if position_table is None else len(position_table), 0
    args = (out, matrix.values.view(np.uint8), matrix.scales, *arrays, *int32s(*sizes), np.float32(scale))
    kernels.get("expand", "expand", **integer_constants(matrix))((T, ceil(vectors, threads)), (threads,), args)


def _wide(outs: int) -> int:
    """Warps side by side that OUTS rows of W take."""
    return outs // 32 or 1


def _part(rows: int, outs: int, bits: int) -> int:
    """Bytes of one of SPLITS parts in a stage: x, padded, and W."""
    return rows * (2 * 8 * CHUNK_BYTES // bits + 16) + outs * CHUNK_BYTES


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def ceil(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(-n // size)
