"""The tensors of GGUF files: which of them stay as they are, are repacked or dequantised.

What stays is mapped if possible, unless the backend's loader copies it (`backends/loader.py`).

    F32, F16, BF16          as they are
    Q8_0, Q4_0, Q4_1        int8 and int4 in groups of 32, of Q4_1 with offsets (`reference/quantize.py`), bit for bit:
                            a block of the file is its float16 scale, its offset and then its integers, which are
                            copied apart once, at load
    Q2_K to Q6_K, Q5_0,     blocks as they are (`reference/blocks.py`): the kernels in C multiply them, NumPy expands
    Q5_1, IQ4_NL, IQ4_XS,   them at each product. A backend without them converts: a GPU Q4_K to int4 with offsets
    MXFP4                   (same integers, scales in float16), others to 16 bits. Q5_0 that is copied becomes Q5_0X2
    every other type        dequantised in chunks of rows by the package `gguf` (extra "gguf"), then kept in float16

Q, K and V, or gate and up, of unlike types stay apart and are multiplied in one launch. Experts are one matrix each:
those of one type are copied below one another, others become float16.

`load` and `chunks`, and so every other dtype, give float32 that is rounded as llama.cpp's. The dequantised numbers of
other types are products of a float16 scale and an integer of few bits: float16 rounds them by 2^-12, which no text
shows. SmolLM2-135M in Q4_1, perplexity of tests/real/alice.txt: 20.9932 as float32 and as it is on NumPy; 20.9939 in
float16; 21.0024 as it is by the kernels in C, which round activations to 8 bits; 21.10 in int8 and 24.57 in int4, which
round the weights anew. Decoding takes 0.68 of float16's time (kernels in C, one thread of a Zen 3), int4 0.58.

The same file requantised by llama.cpp (Q4_K_M: Q5_0, Q8_0, Q4_K and Q6_K, since 576 is no multiple of 256), perplexity
of the first 512 tokens: 23.4268 in float32 and as it is on NumPy, 23.4078 by the kernels in C, 23.4605 by llama.cpp; in
Q6_K 22.6699, 22.6549 and 22.8544.

Numbers: https://github.com/ggml-org/llama.cpp (`ggml/src/ggml-quants.c`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.formats import INT4, INT4_OFFSETS, INT8
from ...errors import CheckpointError, UnsupportedModelError, install
from ...reference.blocks import BLOCK_FORMATS, BlockMatrix, dequantize_blocks
from ...reference.quantize import Quantized, dequantize
from ..tensors import ComputedTensor, StoredTensor, WeightFile, c_strides
from .file import GGUF, Located, Type, read_shards

CHUNK = 1 << 20
"""Numbers that are dequantised at a time"""
COPIED = 1 << 20
"""Bytes of blocks that are copied at a time"""
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that stay as they are -> their names in minillm"""
GROUPS = {"Q8_0": INT8.name, "Q4_0": INT4.name, "Q4_1": INT4_OFFSETS.name}
"""Types that are kept as integers -> their names in minillm"""


def kept_dtype(kind: Type) -> str:
    """The format that tensors of a type are kept in, by its name in `formats.STORED_FORMATS`."""
    name = FLOATS.get(kind.name) or GROUPS.get(kind.name)
    return name or (kind.name if kind.name in BLOCK_FORMATS else "float16")


@dataclass(frozen=True, eq=False)
class BlockTensor(ComputedTensor):
    """A tensor [..., in] stored in blocks, read on demand."""

    shape: tuple[int, ...]
    type: Type
    data: StoredTensor
    """uint8 [..., bytes of a row]"""

    @property
    def name(self) -> str:
        """Its name in the file."""
        return self.data.name

    @property
    def file(self) -> WeightFile:
        """The file that it is in."""
        return self.data.file

    @property
    def dtype(self) -> str:
        """The format it is kept in, by its name in `formats.STORED_FORMATS`."""
        return kept_dtype(self.type)

    def stored(self) -> Any:
        """The tensor in the format it is kept in. [out, in]

        Blocks are mapped if possible; a `Quantized` and float16 are in new arrays.
        """
        if self.type.name in BLOCK_FORMATS:
            return self._matrix(self._rows())
        if self.type.name not in GROUPS:
            return super().stored()
        return self.copied()

    def _matrix(self, rows: NDArray[np.uint8]) -> BlockMatrix:
        return BlockMatrix(rows, BLOCK_FORMATS[self.type.name])

    def copied(self, empty: Callable[..., NDArray[Any]] = np.empty) -> Any:
        """As `stored`, of a matrix with scales: nothing stays mapped; `empty` makes arrays, by shape and dtype."""
        if self.type.name not in BLOCK_FORMATS:
            return self._copied_apart(empty)
        blocks = empty((math.prod(self.data.shape[:-1]), self.data.shape[-1]), np.uint8)
        self.data.read_into(blocks.reshape(self.data.shape))
        return self._matrix(blocks)

    def _copied_apart(self, empty: Callable[..., NDArray[Any]]) -> Quantized:
        """All blocks, `_apart`. They are copied some rows at a time, and the mapped pages of these given back."""
        rows, data = self._rows(), self.data
        whole_rows = data.strides == c_strides(data.shape)
        step = max(1, COPIED // max(1, rows.shape[1]))
        whole = self._empty(len(rows), empty)
        for first in range(0, len(rows), step):
            stop = min(first + step, len(rows))
            self._apart(rows[first:stop], whole, first)
            if whole_rows:
                data.file.release(*(data.offset + row * rows.shape[1] for row in (first, stop)))
        return whole

    def _empty(self, rows: int, empty: Callable[..., NDArray[Any]] = np.empty) -> Quantized:
        """Arrays for integers, scales and offsets. [rows, in] or [rows, in / 2], and [rows, in / 32] twice"""
        inputs, groups = self.shape[-1], self.shape[-1] // self.type.numbers
        in_8_bits = self.type.name == "Q8_0"
        values = empty((rows, inputs if in_8_bits else inputs // 2), np.int8 if in_8_bits else np.uint8)
        scales = empty((rows, groups), np.float16)
        offsets = empty((rows, groups), np.float16) if self.type.name == "Q4_1" else None
        return Quantized(values, scales, inputs, offsets)

    def _apart(self, rows: NDArray[np.uint8], out: Quantized, first: int = 0) -> Quantized:
        """Write the integers, scales and offsets of blocks [n, bytes of a row] to rows of `out` from `first` on."""
        some = slice(first, first + len(rows))
        numbers = [array for array in (out.scales, out.offsets) if array is not None]
        head = 2 * len(numbers)  # bytes of scale and offset
        integers = np.dtype(f"V{self.type.bytes - head}")  # of a block, as one item: far faster than as bytes
        blocks = rows.view([("head", "<f2", (len(numbers),)), ("integers", integers)])  # [n, bytes] -> [n, blocks]
        out.values[some].view(integers)[:] = blocks["integers"]
        for i, array in enumerate(numbers):
            array[some] = blocks["head"][..., i]
        return out

    def _rows(self) -> NDArray[np.uint8]:
        """The blocks of all rows. [rows, bytes of a row]"""
        stored: NDArray[np.uint8] = self.data.stored(("uint8",))
        return stored.reshape(-1, stored.shape[-1])

    def rounded(self, chunk: NDArray[np.float32]) -> NDArray[np.float16]:
        """Values as float16.

        Raises:
            CheckpointError: one is not finite there; the least number that becomes infinite is 65,520.
        """
        return in_float16(chunk, f"{self.name} in {self.data.file.path}")

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The dequantised values, some rows at a time."""
        rows = self._rows()
        if len(self.shape) == 1:
            yield self._values(rows)[0]
            return
        step = len(rows) // max(1, self.shape[0])  # rows of the file in one of ours
        count = max(1, CHUNK // max(1, step * self.shape[-1]))
        for first in range(0, self.shape[0], count):
            values = self._values(rows[first * step : (first + count) * step])
            yield values.reshape(-1, *self.shape[1:])
        self.data.release()

    def _values(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Dequantise rows. [n, bytes of a row] -> [n, in]"""
        if self.type.name in BLOCK_FORMATS:
            return dequantize_blocks(self._matrix(rows))
        if self.type.name in GROUPS:
            return dequantize(self._apart(rows, self._empty(len(rows))))
        return dequantize_by_package(rows, self.type, self.name)

    def merged_with(self, other: Any) -> "BlockTensor | None":
        """Both as one tensor if their rows are adjacent in the file, else None."""
        if not isinstance(other, BlockTensor) or other.type != self.type:
            return None
        data = self.data.merged_with(other.data)
        return None if data is None else BlockTensor((data.shape[0], *self.shape[1:]), self.type, data)

    def part(self, axis: int, first: int, stop: int) -> "BlockTensor":
        """Rows (axis 0), or columns of whole blocks (axis 1), `first` to `stop`; the rest is not read.

        Raises:
            CheckpointError: a range of columns that begins or ends within a block.
        """
        shape = (*self.shape[:axis], stop - first, *self.shape[axis + 1 :])
        if axis == len(self.shape) - 1:
            if first % self.type.numbers or stop % self.type.numbers:
                raise CheckpointError(
                    f"tensor {self.name}: columns {first} to {stop} of {self.shape[-1]} are not whole blocks of "
                    f"{self.type.numbers} weights: share the model among fewer ranks"
                )
            first, stop = (n // self.type.numbers * self.type.bytes for n in (first, stop))
        return BlockTensor(shape, self.type, self.data.part(axis, first, stop))

    def item(self, index: int) -> "BlockTensor":
        """Number `index` of the tensors that this one holds, without the first axis; the rest is not read."""
        return BlockTensor(self.shape[1:], self.type, self.data.item(index))


def in_float16(chunk: NDArray[np.float32], name: str) -> NDArray[np.float16]:
    """Values as float16; `name` is the tensor's, for the error.

    Raises:
        CheckpointError: one is not finite there; the least number that becomes infinite is 65,520.
    """
    if chunk.size and not (chunk.max() < 65_520 and chunk.min() > -65_520):
        raise CheckpointError(f"tensor {name} holds NaN, infinity or a number above 65,504")
    return chunk.astype(np.float16)


def dequantize_by_package(rows: NDArray[np.uint8], kind: Type, name: str) -> NDArray[np.float32]:
    """Dequantise rows of any type that the package `gguf` knows. [n, bytes of a row] -> [n, in]

    Raises:
        UnsupportedModelError: the package is not installed, or does not know the type.
    """
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize as dequantized
    except ImportError:
        raise UnsupportedModelError(
            f"tensor {name} is stored as {kind.name}, which the package gguf dequantises: {install('gguf')}"
        ) from None
    try:
        with np.errstate(all="ignore"):  # scales may be any bits
            # as one long row: the package takes 16 rows at a time, and short ones take longer to find than to compute
            values: NDArray[np.float32] = dequantized(rows.reshape(1, -1), GGMLQuantizationType[kind.name])
    except (KeyError, NotImplementedError):
        raise UnsupportedModelError(
            f"tensor {name} is stored as {kind.name}, for which the package gguf has no dequantisation: take the model "
            "in another type, such as Q8_0 or Q4_K"
        ) from None
    return values.reshape(len(rows), -1)


def as_rows(tensor: StoredTensor | BlockTensor) -> StoredTensor | BlockTensor:
    """A tensor of several matrices as one, below one another. [..., out, in] -> [... out, in]"""
    if isinstance(tensor, BlockTensor):
        data = as_rows(tensor.data)
        assert isinstance(data, StoredTensor)
        return BlockTensor((data.shape[0], tensor.shape[-1]), tensor.type, data)
    shape = (math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return replace(tensor, shape=shape, strides=c_strides(shape))


def open_tensors(gguf: GGUF) -> dict[str, StoredTensor | BlockTensor]:
    """The tensors of a model, in one file or in shards, by the names there; values are read on demand."""
    tensors: dict[str, StoredTensor | BlockTensor] = {}
    for shard in read_shards(gguf):
        file = WeightFile(shard.path)
        tensors |= {name: _tensor(located, file) for name, located in shard.tensors.items()}
    return tensors


def _tensor(located: Located, file: WeightFile) -> StoredTensor | BlockTensor:
    name, shape, kind = located.name, located.shape, located.type
    if kind.numbers == 1:
        return StoredTensor(name, shape, FLOATS.get(kind.name, kind.name), file, located.offset, c_strides(shape))
    packed = (*shape[:-1], shape[-1] // kind.numbers * kind.bytes)
    return BlockTensor(shape, kind, StoredTensor(name, packed, "uint8", file, located.offset, c_strides(packed)))
