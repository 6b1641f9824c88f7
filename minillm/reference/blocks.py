"""The block formats of GGUF files, and of code books: a row is a sequence of blocks, each with its numbers and scales.

    weight = scale x integer + offset        one scale, and in some formats one offset, for each 32 or 16 weights

In blocks of 32 weights the scale is stored as it is. In blocks of 256 it is the product of a float16 number of the
block, d, and of a small integer; so is minus the offset, of dmin. A `BlockMatrix` holds the bytes of a file and
`dequantize_blocks` computes its weights, in float32 and with llama.cpp's roundings: bit for bit what the package `gguf`
gives (tests/reference/test_blocks.py).

Layouts, with bytes in their order and numbers of bits in brackets; "nibbles" are 4 bits, low ones before high ones:

    Q5_0    d[16], a fifth bit of each weight [32 x 1], nibbles [16 bytes]            scale d, integer - 16
    Q5_1    d[16], m[16], fifth bits, nibbles                                         scale d, offset m
    IQ4_NL  d[16], nibbles                                                            scale d, integers of NONLINEAR
    MXFP4   e[8], nibbles                                                             scale 2^(e - 128), integers of FP4
    Q4_K    d, dmin, scales and offsets [12 bytes], nibbles [128 bytes]               scale d x [6], offset -dmin x [6]
    Q5_K    d, dmin, scales and offsets, fifth bits [32 bytes], nibbles               likewise
    Q6_K    nibbles, two more bits [64 bytes], scales [16 x 8, signed], d             scale d x [8], integer - 32
    IQ4_XS  d, two more bits of scales [16], nibbles of scales [4 bytes], nibbles     scale d x ([6] - 32), NONLINEAR
    Q3_K    a third bit [32 bytes], two bits [64 bytes], scales [12 bytes], d         scale d x ([6] - 32), integer - 4
    Q2_K    scales and offsets [16 x (4 and 4)], two bits [64 bytes], d, dmin         scale d x [4], offset -dmin x [4]

Not GGUF's are four more. Kernels in C read the fifth bits of two blocks of Q5_0 with fewer instructions where they
are side by side, so these are reordered when they are loaded (`in_pairs`). Into the others published checkpoints are
(`formats/schemes/codebooks.py`):

    Q5_0X2  two d [2 x 16], fifth bits [8 bytes], nibbles [2 x 16 bytes]              as Q5_0

    NVFP4   two scales of 16 weights [2 x 32], nibbles [16 bytes]                     scale [32] / 2, integers of FP4
    NF4     scale of 64 weights [32], nibbles of each 32 weights                      scale [32], floats of NF4_CODES
    FP4     the same                                                                  scale [32], floats of FP4_CODES

A scale there is the float32 that the scheme's own software computes (of NVFP4 the product of a number of 8 bits and one
of the matrix), so that weights are its own, bit for bit.

Order of the weights. In a block of 32, byte j has the nibbles of weights j and j + 16. In a block of 256:

    Q4_K, Q5_K  of each two groups of 32, byte j has the nibble of weight j of both, one low and one high; in byte j of
                the fifth bits, bit g is that of weight j of group g
    Q6_K        of each four groups, byte j of 64 has nibbles of weight j of the first two, low, and the last two, high;
                byte j of 32 has their two more bits, group after group from the lowest on
    IQ4_XS      as eight blocks of 32
    Q3_K, Q2_K  of each four groups, byte j of 32 has their two bits, from the lowest on; third bits are as fifth ones
    Q5_0X2      in byte j of the fifth bits, bit 2 g + i is that of weight 16 + 8 i + j of block g, bit 4 + 2 g + i that
                of weight 8 i + j

Source: https://github.com/ggml-org/llama.cpp (`ggml/src/ggml-common.h`, `ggml-quants.c`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .quantize import Quantized

CHUNK = 1 << 17
"""Weights dequantised at once, so that intermediate results stay in a core's cache."""
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""The code book of IQ4_NL and IQ4_XS: integers for nibbles 0 to 15"""
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the numbers of MXFP4's type E2M1: a sign, two bits of exponent, one of fraction"""

NF4_CODES = np.array(
    [
        -1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1,
    ],
    np.float32,
)  # fmt: skip
"""The code book of bitsandbytes' NF4: quantiles of a normal distribution, of which the largest is 1"""
FP4_CODES = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(
    12
)
"""The code book of bitsandbytes' FP4"""

Bytes = NDArray[np.uint8]


class Split(NamedTuple):
    """Blocks as numbers: weight = scale x integer + offset."""

    scales: NDArray[np.float32]
    """[n, groups of a block]"""
    integers: NDArray[Any]
    """[n, weights of a block]: int8, of NF4 and FP4 float32"""
    offsets: NDArray[np.float32] | None = None
    """[n, groups of a block]; None: all are 0"""


@dataclass(frozen=True)
class BlockFormat:
    """A block format."""

    name: str
    """llama.cpp's name, or the scheme's"""
    numbers: int
    """Weights of a block"""
    bytes: int
    """Bytes of a block"""
    group: int
    """Neighbours that share a scale: 32, 16 or 64"""
    split: Callable[[Bytes], Split]
    """Blocks [n, bytes] as numbers"""

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` weights, whole blocks."""
        return -(-width // self.numbers) * self.bytes


@dataclass(frozen=True, eq=False)
class BlockMatrix:
    """A matrix [out, in] in a block format, as a GGUF file holds it."""

    blocks: Bytes
    """[out, bytes of a row]"""
    form: BlockFormat
    padded: int | None = None
    """in, where it is less than the blocks have: of predictions alone"""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return len(self.blocks), self.padded or self.blocks.shape[1] // self.form.bytes * self.form.numbers

    @property
    def group(self) -> int:
        """Weights that share a scale."""
        return self.form.group

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return self.blocks.nbytes

    def each(self, change: Callable[[Any], Any]) -> "BlockMatrix":
        """A matrix with a change to its array, such as the order of its rows."""
        return BlockMatrix(change(self.blocks), self.form)


def dequantize_blocks(matrix: BlockMatrix, rows: Any = slice(None)) -> NDArray[np.float32]:
    """Dequantise all rows, or those selected by `rows`. [out, in] -> [rows, in]"""
    form, picked = matrix.form, np.ascontiguousarray(matrix.blocks[rows])
    blocks = picked.reshape(-1, form.bytes)  # [rows, bytes of a row] -> [rows x blocks, bytes of a block]
    weights = np.empty((len(blocks), form.numbers), np.float32)
    step = CHUNK // form.numbers
    with np.errstate(all="ignore"):  # scales may be any bits
        for first in range(0, len(blocks), step):
            split = form.split(blocks[first : first + step])
            out = weights[first : first + step].reshape(len(split.scales), -1, form.group)
            np.multiply(split.integers.reshape(out.shape), split.scales[..., None], out=out)
            if split.offsets is not None:
                out += split.offsets[..., None]
    return weights.reshape(len(picked), matrix.shape[1])


def with_offsets(matrix: BlockMatrix, name: str = "") -> Quantized:
    """Q4_K as int4 with offsets, for backends without its blocks: the same integers; `name` is the tensor's.

    Scales and offsets are rounded to float16. That moves weights by 0.07 % of their size (rms, in Gemma 3 270M);
    float16 weights would move by 0.02 % and take 3.2 times the memory.

    Raises:
        CheckpointError: a scale or an offset is not finite in float16.
    """
    with np.errstate(all="ignore"):
        split = matrix.form.split(np.ascontiguousarray(matrix.blocks).reshape(-1, matrix.form.bytes))
        assert split.offsets is not None and matrix.form.name == "Q4_K"
        rows, inputs = matrix.shape
        scales, offsets = (part.astype(np.float16).reshape(rows, -1) for part in (split.scales, split.offsets))
    if not (np.isfinite(scales).all() and np.isfinite(offsets).all()):
        raise CheckpointError(f"tensor {name} holds a scale or an offset that is not finite in float16")
    halves = split.integers.view(np.uint8).reshape(rows, -1, 2, 16)  # [n, 256] -> [rows, in / 32, 2, 16]
    values = (halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)).reshape(rows, -1)
    return Quantized(values, scales, inputs, offsets)


_SINGLE = np.dtype([("d", "<u2"), ("low", "<u2"), ("high", "<u2"), ("nibbles", "V16")])
_PAIR = np.dtype([("d", "<u2", 2), ("bits", "<u8"), ("nibbles", "V16", 2)])


def in_pairs(rows: Bytes) -> Bytes:
    """Blocks of Q5_0 as Q5_0X2, in which each two are one; rows have an even number. [n, bytes] -> [n, bytes]"""
    single = rows.view(_SINGLE).reshape(-1, 2)  # [n, bytes] -> [pairs, 2]
    pairs, words = np.empty(len(single), _PAIR), np.empty((len(single), 4), "<u2")
    pairs["d"], pairs["nibbles"] = single["d"], single["nibbles"]
    words[:, :2], words[:, 2:] = single["high"], single["low"]  # fifth bits of 16 weights each
    bits = words.view("<u8")[:, 0]
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        other = (bits ^ bits >> np.uint64(shift)) & np.uint64(mask)  # transposes 8 x 8 bits ("Hacker's Delight", 7-3)
        bits ^= other ^ other << np.uint64(shift)
    pairs["bits"] = bits
    return pairs.view(np.uint8).reshape(rows.shape)


def in_8_bits(matrix: BlockMatrix, name: str = "") -> Quantized:
    """Blocks of integers as a matrix of 8 bits, with the groups of the blocks; `name` is the tensor's.

    For backends without the blocks. The integers are the same; scales and offsets are rounded to float16, in which
    those of Q5_0, Q5_1 and IQ4_NL are stored; MXFP4's are powers of two, and exact from 2^-24 on.

    Raises:
        CheckpointError: a scale or an offset is not finite in float16.
    """
    (rows, inputs), form = matrix.shape, matrix.form
    values, scales = np.empty((rows, inputs), np.int8), np.empty((rows, inputs // form.group), np.float16)
    offsets: NDArray[np.float16] | None = None
    step = max(1, CHUNK // max(1, inputs))
    for first in range(0, rows, step):
        some = slice(first, first + step)
        with np.errstate(all="ignore"):
            split = form.split(np.ascontiguousarray(matrix.blocks[some]).reshape(-1, form.bytes))
            values[some] = split.integers.reshape(-1, inputs)
            scales[some] = split.scales.reshape(-1, scales.shape[1])
            if split.offsets is not None:
                offsets = np.empty_like(scales) if offsets is None else offsets
                offsets[some] = split.offsets.reshape(-1, scales.shape[1])
    if not (np.isfinite(scales).all() and (offsets is None or np.isfinite(offsets).all())):
        raise CheckpointError(f"tensor {name} holds a scale or an offset that is not finite in float16")
    return Quantized(values, scales, inputs, offsets)


# --- parts of blocks --------------------------------------------------------------------------------------------------


def _floats(blocks: Bytes, first: int, count: int = 1) -> NDArray[np.float32]:
    """`count` float16 numbers from byte `first` on, as float32. [n, bytes] -> [n, count]"""
    return np.ascontiguousarray(blocks[:, first : first + 2 * count]).view("<f2").astype(np.float32)


def _fields(part: Bytes, bits: int) -> Bytes:
    """The numbers of `bits` bits in each byte, from the lowest on. [n, ...] -> [n, 8 / bits, ...]"""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, *(1,) * (part.ndim - 1))
    fields: Bytes = (part[:, None] >> shifts) & np.uint8((1 << bits) - 1)
    return fields


def _nibbles(part: Bytes, size: int) -> Bytes:
    """The nibbles of each `size` bytes: all low ones, then all high ones. [n, bytes] -> [n, 2 bytes]"""
    return _fields(part.reshape(-1, size), 4).reshape(len(part), -1)


def _six_bits(part: Bytes) -> tuple[Bytes, Bytes]:
    """Q4_K's and Q5_K's eight numbers for scales, and eight for offsets, in 12 bytes. [n, 12] -> 2 x [n, 8]"""
    low, middle, high = np.split(part, 3, axis=1)  # [n, 4] each
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    return scales, np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)


# --- blocks of 32 -----------------------------------------------------------------------------------------------------


def _fifth_bits(part: Bytes) -> Bytes:
    """Bits of 32 weights as 0 or 16. [n, 4] -> [n, 32]"""
    return np.unpackbits(part, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Split:
    integers = (_nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])).view(np.int8) - np.int8(16)
    return Split(_floats(blocks, 0), integers)


def _q5_0x2(blocks: Bytes) -> Split:
    shifts = np.arange(4, dtype=np.uint8).reshape(2, 2, 1)  # of both groups, of two times 8 weights
    shifted = blocks[:, None, None, 4:12] >> shifts  # [n, 8] -> [n, 2, 2, 8]
    fifth = np.stack([shifted & 16, (shifted & 1) << np.uint8(4)], axis=2)  # -> [n, 2, halves, 2, 8]
    integers = _nibbles(blocks[:, 12:], 16) | fifth.reshape(len(blocks), -1)  # [n, 64]
    return Split(_floats(blocks, 0, 2), integers.view(np.int8) - np.int8(16))


def _q5_1(blocks: Bytes) -> Split:
    integers = (_nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])).view(np.int8)
    return Split(_floats(blocks, 0), integers, _floats(blocks, 2))


def _iq4_nl(blocks: Bytes) -> Split:
    return Split(_floats(blocks, 0), NONLINEAR[_nibbles(blocks[:, 2:], 16)])


def _mxfp4(blocks: Bytes) -> Split:
    exponents = blocks[:, :1].astype(np.uint32)
    subnormal = np.uint32(0x200000) << exponents  # 2^-128 and 2^-127
    scales = np.where(exponents < 2, subnormal, (exponents - np.uint32(1)) << np.uint32(23)).view(np.float32)
    return Split(scales, FP4[_nibbles(blocks[:, 1:], 16)])


def _nvfp4(blocks: Bytes) -> Split:
    return Split(np.ascontiguousarray(blocks[:, :8]).view("<f4") * np.float32(0.5), FP4[_nibbles(blocks[:, 8:], 16)])


# --- code books of floats ---------------------------------------------------------------------------------------------


def _nf4(blocks: Bytes) -> Split:
    return Split(np.ascontiguousarray(blocks[:, :4]).view("<f4"), NF4_CODES[_nibbles(blocks[:, 4:], 16)])


def _fp4(blocks: Bytes) -> Split:
    return Split(np.ascontiguousarray(blocks[:, :4]).view("<f4"), FP4_CODES[_nibbles(blocks[:, 4:], 16)])


# --- blocks of 256 ----------------------------------------------------------------------------------------------------


def _scaled_twice(blocks: Bytes, integers: Bytes) -> Split:
    """Q4_K and Q5_K, which begin alike."""
    d, dmin = np.split(_floats(blocks, 0, 2), 2, axis=1)  # [n, 1] each
    scales, drops = _six_bits(blocks[:, 4:16])
    return Split(d * scales, integers.view(np.int8), -(dmin * drops))


def _q4_k(blocks: Bytes) -> Split:
    return _scaled_twice(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Bytes) -> Split:
    fifth = _fields(blocks[:, 16:48], 1).reshape(len(blocks), -1)  # [n, 32] -> [n, 8, 32] -> [n, 256]
    return _scaled_twice(blocks, _nibbles(blocks[:, 48:], 32) | fifth << np.uint8(4))


def _q6_k(blocks: Bytes) -> Split:
    more = _fields(blocks[:, 128:192].reshape(-1, 32), 2).reshape(len(blocks), -1)  # -> [2 n, 4, 32] -> [n, 256]
    integers = (_nibbles(blocks[:, :128], 64) | more << np.uint8(4)).view(np.int8) - np.int8(32)
    return Split(_floats(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8), integers)


def _iq4_xs(blocks: Bytes) -> Split:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3  # [n, 8]
    low = _fields(blocks[:, 4:8], 4).transpose(0, 2, 1).reshape(-1, 8)  # two neighbours in a byte
    steps = (low | high.astype(np.uint8) << np.uint8(4)).view(np.int8) - np.int8(32)
    return Split(_floats(blocks, 0) * steps, NONLINEAR[_nibbles(blocks[:, 8:], 16)])


def _two_bits(part: Bytes) -> Bytes:
    """The two bits of four groups of 32 in each 32 bytes. [n, 64] -> [n, 256]"""
    return _fields(part.reshape(-1, 32), 2).reshape(len(part), -1)


def _q3_k(blocks: Bytes) -> Split:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    steps = _nibbles(low, 8) | _fields(high, 2).reshape(-1, 16) << np.uint8(4)  # [n, 16]
    third = _fields(blocks[:, :32], 1).reshape(len(blocks), -1)  # [n, 32] -> [n, 8, 32] -> [n, 256]
    integers = (_two_bits(blocks[:, 32:96]) | third << np.uint8(2)).view(np.int8) - np.int8(4)
    return Split(_floats(blocks, 108) * (steps.view(np.int8) - np.int8(32)), integers)


def _q2_k(blocks: Bytes) -> Split:
    d, dmin = np.split(_floats(blocks, 80, 2), 2, axis=1)  # [n, 1] each
    return Split(d * (blocks[:, :16] & 15), _two_bits(blocks[:, 16:80]).view(np.int8), -(dmin * (blocks[:, :16] >> 4)))


BLOCK_FORMATS = {
    form.name: form
    for form in (
        BlockFormat("Q4_K", 256, 144, 32, _q4_k),
        BlockFormat("Q5_K", 256, 176, 32, _q5_k),
        BlockFormat("Q6_K", 256, 210, 16, _q6_k),
        BlockFormat("Q5_0", 32, 22, 32, _q5_0),
        BlockFormat("Q5_1", 32, 24, 32, _q5_1),
        BlockFormat("IQ4_NL", 32, 18, 32, _iq4_nl),
        BlockFormat("MXFP4", 32, 17, 32, _mxfp4),
        BlockFormat("IQ4_XS", 256, 136, 32, _iq4_xs),
        BlockFormat("Q3_K", 256, 110, 16, _q3_k),
        BlockFormat("Q2_K", 256, 84, 16, _q2_k),
        BlockFormat("NVFP4", 32, 24, 16, _nvfp4),
        BlockFormat("Q5_0X2", 64, 44, 32, _q5_0x2),
        BlockFormat("NF4", 64, 36, 64, _nf4),
        BlockFormat("FP4", 64, 36, 64, _fp4),
    )
}
"""By their names, in the order of their numbers in `kernels/cpu/simd.h`"""
CODE_BOOKS = ("NF4", "FP4")
"""Code books of floats: others are multiplied as integers"""
