"""Matrices of 4-bit codes with a scale for a few neighbours, as blocks of `reference/blocks.py`.

    E2M1 (a sign, two bits of exponent, one of fraction) with exponents of 32 neighbours    MXFP4
    E2M1 with scales of 16 neighbours                                                       NVFP4
    a code book of bitsandbytes with scales of 64 neighbours or more                        NF4, FP4

Weights of the blocks are those that the scheme's own software dequantises to float32, bit for bit. A matrix whose rows
are not whole blocks is expanded.

Definitions: OCP Microscaling Formats, 2023 (E2M1, E8M0); NVIDIA, "Introducing NVFP4", 2025.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ...reference.blocks import BLOCK_FORMATS, FP4, FP4_CODES, NF4_CODES
from .matrix import Matrix, Rows

E2M1 = FP4 * np.float32(0.5)
"""The value of each code"""
CODES = {"NF4": NF4_CODES, "FP4": FP4_CODES}
NOT_A_NUMBER = 255
"""The exponent that stands for NaN"""


def e2m1_matrix(name: str, shape: tuple[int, int], codes: Rows, scales: Rows, size: int) -> Matrix:
    """A matrix of E2M1.

    Args:
        name: of the weight
        shape: [out, in]
        codes: of rows, [n, in] from 0 to 15
        scales: of rows, [n, in / size]: float32 of 16 neighbours, uint8 exponents of 32, 127 higher than they are
        size: neighbours that share a scale, 16 or 32
    """
    form = {16: "NVFP4", 32: "MXFP4"}[size]

    def checked(first: int, stop: int) -> NDArray[Any]:
        stored = scales(first, stop)
        if form == "MXFP4" and stored.size and stored.max() == NOT_A_NUMBER:
            raise CheckpointError(f"a scale of tensor {name} is {NOT_A_NUMBER}, which stands for NaN")
        return stored

    def as_floats(first: int, stop: int) -> NDArray[np.float32]:
        stored = checked(first, stop)
        return stored if form == "NVFP4" else np.ldexp(np.float32(1), stored.astype(np.int32) - 127)

    def blocks(first: int, stop: int) -> NDArray[np.uint8]:
        return _joined(checked(first, stop), in_halves(codes(first, stop)))

    keeps = shape[1] % BLOCK_FORMATS[form].numbers == 0
    return Matrix(
        name=name,
        shape=shape,
        numbers=lambda first, stop: E2M1[codes(first, stop)],
        scales=as_floats,
        size=size,
        block=form if keeps else "",
        blocks=blocks if keeps else None,
    )


def code_book_matrix(
    name: str,
    shape: tuple[int, int],
    codes: Rows,
    scales: Callable[[int, int], NDArray[np.float32]],
    table: Any,
    size: int,
) -> Matrix | None:
    """A matrix of bitsandbytes in blocks, or None where there are none of its kind.

    Args:
        name: of the weight
        shape: [out, in]
        codes: of rows, [n, in] from 0 to 15
        scales: of all blocks of the matrix as one line, from a first to a last one, float32
        table: the value of each code, float32 [16]
        size: numbers of a block
    """
    kinds = [kind for kind, known in CODES.items() if np.array_equal(known, table)]
    form = BLOCK_FORMATS[kinds[0]] if kinds else None
    if form is None or size % form.numbers or shape[1] % form.numbers:
        return None
    each, inputs = form.numbers, shape[1]

    def by_block(first: int, stop: int) -> NDArray[np.float32]:
        """The scale of each of our blocks. [n, in / 64]"""
        begin, end = first * inputs, stop * inputs
        shared = scales(begin // size, -(-end // size))
        places = np.arange(begin, end, each) // size - begin // size
        return shared[places].reshape(stop - first, inputs // each)

    def blocks(first: int, stop: int) -> NDArray[np.uint8]:
        nibbles = in_halves(codes(first, stop)).reshape(stop - first, -1, each // 2)  # [n, in / 64, 32]
        return _joined(by_block(first, stop), nibbles)

    return Matrix(
        name=name,
        shape=shape,
        numbers=lambda first, stop: np.asarray(table)[codes(first, stop)],
        scales=by_block,
        size=each,
        block=form.name,
        blocks=blocks,
    )


def low_first(pairs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes of bytes, the low nibble before the high one. [n, m] -> [n, 2 m]"""
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)


def in_halves(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes as GGUF's nibbles: of each 32, byte j has numbers j and j + 16. [n, in] -> [n, in / 32, 16]"""
    halves = codes.reshape(len(codes), -1, 2, 16)
    nibbles: NDArray[np.uint8] = halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
    return nibbles


def _joined(scales: NDArray[Any], nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blocks of scales and nibbles as rows. [n, groups], [n, blocks, bytes] -> [n, bytes of a row]"""
    little = np.ascontiguousarray(scales, scales.dtype.newbyteorder("<")).view(np.uint8)
    heads = little.reshape(*nibbles.shape[:2], -1)  # [n, groups x bytes] -> [n, blocks, bytes of scales]
    return np.concatenate([heads, nibbles], axis=-1).reshape(len(nibbles), -1)
