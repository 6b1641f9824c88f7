"""Tensors where they are stored, and the loader that turns them into the weights of a backend."""

import math
import mmap
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..progress import tick
from ..reference.blocks import BLOCK_FORMATS, BlockMatrix, in_8_bits, in_pairs, with_offsets
from ..reference.quantize import Quantized, quantize, widened, with_zeros
from .formats import (
    BLOCKS,
    FLOAT16,
    FLOAT32,
    INT4,
    INT4_OFFSETS,
    INT4_ZEROS,
    INT8,
    STORED_FORMATS,
    WEIGHT_FORMATS,
    Format,
    Role,
    WeightFormats,
    chosen,
)
from .memory_use import free_memory, total_memory
from .storage import Experts, Joined, narrow
from .weights import Weight

CHUNK = 1 << 20
"""Numbers of a tensor that are made or reordered at a time."""
INTEGERS = {INT8, INT4, INT4_OFFSETS, INT4_ZEROS}
WIDER = {
    INT8: {INT8, INT4},
    INT4_ZEROS: {INT4_ZEROS, INT4},
    INT4_OFFSETS: {INT4_OFFSETS, BLOCKS["Q4_K"]},
    FLOAT16: {FLOAT16, *INTEGERS, *BLOCKS.values()},
}
"""Formats -> those whose matrices they hold too: exactly, or, in float16 and of Q4_K, but for a rounding by 2^-12"""

BLOCKS_IN_8_BITS = {
    **dict.fromkeys((BLOCKS[name] for name in ("Q5_0", "IQ4_NL", "IQ4_XS", "MXFP4")), INT8),
    **dict.fromkeys((BLOCKS["Q5_1"], BLOCKS["Q5_K"]), replace(INT8, offset_bits=16)),
    **dict.fromkeys((BLOCKS["Q6_K"], BLOCKS["Q3_K"]), replace(INT8, group=16)),
    BLOCKS["Q2_K"]: replace(INT8, group=16, offset_bits=16),
}
"""Block formats -> the 8 bits in which backends without blocks have their integers, scales rounded by 2^-12 or not at
all (`reference.blocks.in_8_bits`)"""


class Tensor(Protocol):
    """A tensor that is read when needed: `checkpoint.StoredTensor`, or random numbers."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """The format it is stored in, by its name in `STORED_FORMATS`."""

    def load(self) -> NDArray[np.float32]:
        """The values, memory-mapped if possible."""

    def read_into(self, out: NDArray[Any]) -> None:
        """Fill `out`, of this shape: with the values as float32, or with numbers in 16 bits as they are stored."""

    def stored(self) -> Any:
        """The tensor as stored: an array, bfloat16 as the uint16 of its bits, or a `Quantized`; mapped if possible."""

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The values, some rows at a time; a chunk may reuse the memory of the one before."""

    def merged_with(self, other: Any) -> "Tensor | None":
        """This tensor and `other` as one, if their rows are contiguous in a file; else None."""

    def part(self, axis: int, first: int, stop: int) -> "Tensor":
        """Rows (axis 0) or columns (axis 1) `first` to `stop`; the rest of a file is not read."""


def _never(nbytes: int) -> bool:
    return False


class HugePages:
    """Memory of weights that stay: arrays that begin at cache lines, side by side in blocks of huge pages (Linux).

    NumPy's own arrays begin 16 bytes after a page, so that every second vector lies in two cache lines, and those under
    4 MB are in pages of 4 KB, as mapped files are. A block is released with the last of its arrays.
    """

    BLOCK, PAGE, LINE = 64 << 20, 2 << 20, 64
    SMALLEST = 64 << 10
    """Smaller arrays are NumPy's."""

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An uninitialised array; NumPy's where the system has no huge pages."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes < self.SMALLEST or not hasattr(mmap, "MADV_HUGEPAGE"):
            return np.empty(shape, dtype)
        if len(self._left) < nbytes:
            try:
                self._left = self._block(max(nbytes, self.BLOCK))
            except OSError:  # no address space is left, or the kernel has no huge pages
                return np.empty(shape, dtype)
        taken, self._left = self._left[:nbytes], self._left[-(-nbytes // self.LINE) * self.LINE :]
        array: NDArray[Any] = taken.view(dtype).reshape(shape)
        return array

    def copies(self, nbytes: int) -> bool:
        """Whether a matrix that could be mapped from its file is copied here: half of the memory stays available.

        A product of one row reads it 1.1 to 1.25 times as fast (`benchmarks/README.md`). A mapped one is shared with
        other processes, and is dropped when memory is scarce.
        """
        if nbytes < self.SMALLEST or not self._has_pages:
            return False
        return nbytes <= len(self._left) or free_memory() - nbytes > total_memory() // 2

    @cached_property
    def _has_pages(self) -> bool:
        """Whether the system gives huge pages where they are asked for."""
        try:
            choice = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
        except OSError:
            return False
        return "[never]" not in choice and hasattr(mmap, "MADV_HUGEPAGE")

    def _block(self, size: int) -> NDArray[np.uint8]:
        size = -(-size // self.PAGE) * self.PAGE
        mapped = mmap.mmap(-1, size + self.PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_HUGEPAGE)
        block = np.frombuffer(mapped, np.uint8)
        first = -int(block.__array_interface__["data"][0]) % self.PAGE
        return block[first : first + size]


@dataclass(frozen=True, eq=False)
class Rearranged:
    """A tensor in another order than `source`, or a part of it. Reading copies it: no file can be used in place."""

    source: Tensor
    arrange: Callable[[NDArray[Any]], NDArray[Any]]
    """Maps the stored order to the wanted one; values unchanged, any dtype"""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after reordering."""
        return self.arrange(np.broadcast_to(np.uint8(0), self.source.shape)).shape

    @property
    def dtype(self) -> str:
        """The stored dtype."""
        return self.source.dtype

    def stored(self) -> Any:
        """The stored data, reordered; with scales, all arrays alike, and only by rows."""

        def reordered(array: NDArray[Any]) -> NDArray[Any]:
            return np.ascontiguousarray(self.arrange(array))

        stored = self.source.stored()
        return stored.each(reordered) if isinstance(stored, Quantized | BlockMatrix) else reordered(stored)

    def load(self) -> NDArray[np.float32]:
        """The values as float32, reordered."""
        return np.ascontiguousarray(self.arrange(self.source.load()))

    def read_into(self, out: NDArray[Any]) -> None:
        """Fill `out` with the values: as float32, or in the stored dtype."""
        out[...] = self.arrange(self.source.load() if out.dtype == np.float32 else self.source.stored())

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The values as float32, in chunks of rows."""
        values = self.arrange(self.source.load())
        rows = max(1, CHUNK // max(1, values[:1].size))
        for first in range(0, len(values), rows):
            yield np.ascontiguousarray(values[first : first + rows])

    def merged_with(self, other: Any) -> None:
        """None: reordered tensors are never adjacent in a file."""

    def part(self, axis: int, first: int, stop: int) -> "Rearranged":
        """Rows or columns `first` to `stop` of the reordered tensor; all of `source` is read."""
        taken = (slice(None),) * axis + (slice(first, stop),)
        return Rearranged(self.source, lambda stored: self.arrange(stored)[taken])


@dataclass(frozen=True, eq=False)
class Member(Rearranged):
    """One expert's part of a tensor of all experts: `source` is what the expert has in it, with others' rows."""

    whole: Tensor
    """The tensor of all experts"""


@dataclass(frozen=True, eq=False)
class Regrouped(Rearranged):
    """A part of `source` in another order of rows and columns, as float32 where the stored numbers share scales."""

    name: str
    """Its name where it is written by itself"""

    @property
    def dtype(self) -> str:
        """The stored dtype, or float32."""
        return self.source.dtype if self.source.dtype in ("float32", "float16", "bfloat16") else "float32"

    def stored(self) -> Any:
        """The stored data, reordered, or float32."""
        return super().stored() if self.dtype == self.source.dtype else self.load()


@dataclass(frozen=True, eq=False)
class Shifted:
    """A vector, `source` plus a constant, times a factor, in float32 however `source` is stored."""

    source: Tensor
    offset: float
    factor: float = 1.0
    dtype = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        """As the source."""
        return self.source.shape

    def load(self) -> NDArray[np.float32]:
        """The values."""
        shifted = self.source.load() + np.float32(self.offset)
        return shifted if self.factor == 1 else shifted * np.float32(self.factor)

    def stored(self) -> NDArray[np.float32]:
        """The values."""
        return self.load()

    def read_into(self, out: NDArray[Any]) -> None:
        """Fill `out`, float32, with the values."""
        out[...] = self.load()

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The values, in one piece."""
        yield self.load()

    def merged_with(self, other: Any) -> None:
        """None: no file holds these numbers."""

    def part(self, axis: int, first: int, stop: int) -> "Shifted":
        """Numbers `first` to `stop`."""
        return Shifted(self.source.part(axis, first, stop), self.offset, self.factor)


class Loader:
    """Turns tensors into the weights of a backend, once, at load."""

    def __init__(
        self,
        weights: str | WeightFormats = "float32",
        *,
        kept: Collection[Format] = tuple(STORED_FORMATS.values()),
        order: Literal["C", "F"] = "C",
        xp: Any = np,
        empty: Callable[..., NDArray[Any]] = np.empty,
        copies: Callable[[int], bool] = _never,
    ) -> None:
        """Set the formats of matrices.

        Args:
            weights: a format for each role, or the name of such formats in `WEIGHT_FORMATS`
            kept: the formats of a checkpoint that stay where `weights` names none; others become float32
            order: memory order of float32 projections [out, in]. "C" is the checkpoints', so files are mapped and not
                copied. "F" copies at load; a product with several rows of activations then runs faster.
            xp: the array module of constants
            empty: allocates matrices that are not mapped, by shape and dtype
            copies: whether a matrix of so many bytes is copied that could be mapped
        """
        self.formats = chosen(WEIGHT_FORMATS, weights)
        self.kept = kept
        self.order = order
        self.xp = xp
        self.empty = empty
        self.copies = copies

    def prepare(
        self, name: str, tensors: Sequence[Tensor], biases: Sequence[Tensor] = (), role: Role = "projection"
    ) -> Weight:
        """Convert a parameter to the backend's layout.

        Several tensors [out_i, in] become one weight [sum of out_i, in], such as a fused Q/K/V projection. A single one
        whose format and layout stay is mapped, unless `copies` says otherwise. Vectors are copied, as float32. Where
        tensors keep blocks, each stays as it is (`Joined`), also beside another format.
        """
        bias = join(biases) if biases else None
        if len(tensors[0].shape) == 1:
            return Weight(name, join(tensors), bias, role)
        form = self.formats.of(role)
        if form is None and self._stay_apart(tensors):
            return Weight(name, Joined(tuple(self._gathered([tensor], None) for tensor in tensors)), bias, role)
        return Weight(name, self._gathered(tensors, form), bias, role)

    def prepare_looked_up(self, name: str, tensors: Sequence[Tensor], biases: Sequence[Tensor], role: Role) -> Weight:
        """As `prepare`, of a table of which only rows are read, such as one beside an LM head: it stays mapped."""
        copies, self.copies = self.copies, _never
        try:
            return self.prepare(name, tensors, biases, role)
        finally:
            self.copies = copies

    def _stay_apart(self, tensors: Sequence[Tensor]) -> bool:
        """Whether matrices below one another are kept as they are, since one has blocks."""
        return self._keeps_blocks(tensors) and len(tensors) > 1 and in_one_piece(tensors) is None

    def _keeps_blocks(self, tensors: Sequence[Tensor]) -> bool:
        return any(tensor.dtype in BLOCKS and BLOCKS[tensor.dtype] in self.kept for tensor in tensors)

    def prepare_experts(
        self, name: str, experts: Sequence[Sequence[Tensor]], biases: Sequence[Sequence[Tensor]] = ()
    ) -> Weight:
        """Convert one projection of several experts, each by `prepare`; `experts`, `biases`: each expert's tensors.

        All get the same format, and each is one matrix: blocks of two tensors are copied below one another.
        """
        kinds = {kept_format(tensors, self.kept) for tensors in experts}
        blocks = any(self._keeps_blocks(tensors) for tensors in experts)
        bias = np.stack([join(tensors) for tensors in biases]) if biases else None  # X x [out] -> [X, out]
        if self.formats.projection is None and (len(kinds) > 1 or blocks):
            same = kept_format((tensor for tensors in experts for tensor in tensors), self.kept)
            return Weight(name, Experts(tuple(self._gathered(tensors, same) for tensors in experts)), bias)
        matrices = tuple(self.prepare(f"{name}.{i}", tensors).data for i, tensors in enumerate(experts))
        return Weight(name, Experts(matrices), bias)

    def _gathered(self, tensors: Sequence[Tensor], form: Format | None) -> Any:
        form = kept_format(tensors, self.kept) if form is None else form
        nbytes = sum(math.prod(tensor.shape[:-1]) * form.row_bytes(tensor.shape[-1]) for tensor in tensors)
        copied = self.copies(nbytes)
        data = gather(tensors, form, self.order, self.kept, self.empty, mapped=not copied)
        return _paired(data) if copied else data

    def constant(self, name: str, values: NDArray[np.float32]) -> Weight:
        """A weight of given values, which are in no checkpoint. [n]"""
        return Weight(name, self.xp.asarray(values))

    def computed_table(self, name: str, values: NDArray[np.float32]) -> Weight:
        """A table of given vectors, for `embed`. [n, E]"""
        return self.constant(name, values)

    def copied(self, name: str, array: Any) -> Weight:
        """A weight of what an operation has computed, which the arena will overwrite. Of any shape."""
        return Weight(name, self.xp.array(array, order="C"))

    def random(self, name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
        """A tensor of normal random numbers, the same for the same backend, seed and name."""
        return RandomTensor(name, shape, seed, std)


@dataclass(frozen=True)
class RandomTensor:
    """A tensor of normal random numbers, the same for the same seed and name; for benchmarks and tests."""

    name: str
    shape: tuple[int, ...]
    seed: int
    std: float
    dtype = "float32"

    def stored(self) -> NDArray[np.float32]:
        """The numbers, float32."""
        return self.load()

    def merged_with(self, other: Any) -> None:
        """Always None: there is no file."""

    def part(self, axis: int, first: int, stop: int) -> Rearranged:
        """Rows or columns `first` to `stop`: the numbers that they have in the whole tensor."""
        return Rearranged(self, lambda whole: whole).part(axis, first, stop)

    def load(self) -> NDArray[np.float32]:
        """The numbers, float32."""
        out = np.empty(self.shape, np.float32)
        self.read_into(out)
        return out

    def read_into(self, out: NDArray[np.float32]) -> None:
        """Fill `out` with the numbers. A norm's gain is drawn around 1."""
        first = 0
        for chunk in self.chunks():
            out[first : first + len(chunk)] = chunk
            first += len(chunk)
            tick()

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The numbers, some rows at a time."""
        rng = np.random.default_rng([self.seed, zlib.crc32(self.name.encode())])
        rows = max(1, CHUNK // max(1, math.prod(self.shape[1:])))
        for first in range(0, self.shape[0], rows):
            chunk = rng.standard_normal((min(rows, self.shape[0] - first), *self.shape[1:]), np.float32)
            chunk *= self.std
            if len(self.shape) == 1 and self.name.endswith(".weight"):
                chunk += 1
            yield chunk


def gather(
    tensors: Sequence[Tensor],
    form: Format | None,
    order: Literal["C", "F"] = "C",
    kept: Collection[Format] = tuple(STORED_FORMATS.values()),
    empty: Callable[..., NDArray[Any]] = np.empty,
    *,
    mapped: bool = True,
) -> Any:
    """Concatenate tensors along the first axis, as one array, `Quantized` or `BlockMatrix`.

    Tensors stored in that format are not converted.

    Args:
        tensors: [out_i, in] each
        form: the format of the result; None: as they are stored
        order: memory order of float32; "F" is column-major
        kept: the formats that stay where `form` is None; all others become float32
        empty: allocates the result, by shape and dtype, unless it is mapped or column-major
        mapped: whether tensors stay mapped that are stored in that format, and contiguous in a file
    """
    if form is None:
        form = kept_format(tensors, kept)
    if form == FLOAT32:
        return join(tensors, order, empty, mapped=mapped)
    stored = {STORED_FORMATS.get(tensor.dtype) for tensor in tensors}
    if stored <= {form} and (whole := in_one_piece(tensors)) is not None:
        if mapped:
            return whole.stored()
        if form.scale_bits and (copied := getattr(whole, "copied", None)) is not None:  # read from a file
            return copied(empty)
    if form.block:
        return _copied_blocks(tensors, empty)
    return (_quantized if form.scale_bits else _narrowed)(tensors, form, empty)


def kept_format(tensors: Iterable[Tensor], kept: Collection[Format]) -> Format:
    """The format in `kept` in which tensors become one without rounding, or for integers in float16 with one by 2^-12.

    float32 if there is none.
    """
    stored = {STORED_FORMATS.get(tensor.dtype) for tensor in tensors}
    for form, sources in (*((exact, {exact}) for exact in kept), *WIDER.items()):
        if form in kept and stored <= sources:
            return form
    return FLOAT32


def in_one_piece(tensors: Sequence[Tensor]) -> Tensor | None:
    """All tensors as one, if their rows are contiguous in a file; else None."""
    whole: Tensor | None = tensors[0]
    for tensor in tensors[1:]:
        whole = whole and whole.merged_with(tensor)
    return whole


def join(
    tensors: Sequence[Tensor],
    order: Literal["C", "F"] = "C",
    empty: Callable[..., NDArray[Any]] = np.empty,
    *,
    mapped: bool = True,
) -> NDArray[np.float32]:
    """Concatenate tensors as float32; a single matrix stays mapped if possible and `mapped`.

    Vectors are copied: a mapped one keeps the pages around it in memory. Those of opt-125m are 0.5 MB and would keep
    3.6 MB of a file whose matrices are no longer read once they are rounded.
    """
    if mapped and len(tensors) == 1 and order == "C" and len(tensors[0].shape) > 1:
        return tensors[0].load()
    rows = [tensor.shape[0] for tensor in tensors]
    shape = (sum(rows), *tensors[0].shape[1:])
    joined = empty(shape, np.float32) if order == "C" else np.empty(shape, np.float32, order)
    stops = np.cumsum(rows)
    for tensor, stop in zip(tensors, stops, strict=True):
        tensor.read_into(joined[stop - tensor.shape[0] : stop])
    return joined


def _narrowed(tensors: Sequence[Tensor], form: Format, empty: Callable[..., NDArray[Any]]) -> NDArray[Any]:
    rows = sum(tensor.shape[0] for tensor in tensors)
    out = empty((rows, *tensors[0].shape[1:]), form.dtype)
    first = 0
    for tensor in tensors:
        if STORED_FORMATS.get(tensor.dtype) == form:
            tensor.read_into(out[first : first + tensor.shape[0]])
            first += tensor.shape[0]
            continue
        for chunk in tensor.chunks():
            out[first : first + len(chunk)] = narrow(chunk, form)
            first += len(chunk)
            tick()
    return out


def _copied_blocks(tensors: Sequence[Tensor], empty: Callable[..., NDArray[Any]]) -> BlockMatrix:
    """Tensors in the same block format, below one another."""
    whole, first = None, 0
    for tensor in tensors:
        stored = tensor.stored()
        rows = sum(each.shape[0] for each in tensors)
        whole = whole or stored.each(lambda array, rows=rows: empty((rows, array.shape[1]), array.dtype))
        whole.blocks[first : first + stored.shape[0]] = stored.blocks
        first += stored.shape[0]
        tick()
    assert whole is not None
    matrix: BlockMatrix = whole
    return matrix


def _paired(data: Any) -> Any:
    """Q5_0 as Q5_0X2, in the same memory, where rows have an even number of blocks; anything else as it is."""
    if not isinstance(data, BlockMatrix) or data.form.name != "Q5_0" or data.shape[1] % 64:
        return data
    step = max(1, CHUNK // max(1, data.blocks.shape[1]))
    for first in range(0, len(data.blocks), step):
        data.blocks[first : first + step] = in_pairs(data.blocks[first : first + step])
    return BlockMatrix(data.blocks, BLOCK_FORMATS["Q5_0X2"])


def _quantized(tensors: Sequence[Tensor], form: Format, empty: Callable[..., NDArray[Any]]) -> Quantized:
    rows, whole, first = sum(tensor.shape[0] for tensor in tensors), None, 0
    ready = [STORED_FORMATS.get(tensor.dtype) == form for tensor in tensors]
    for tensor, already in zip(tensors, ready, strict=True):
        blocks: Iterable[Quantized]
        if already:
            blocks = [tensor.stored()]
        elif form in (INT8, INT4_ZEROS) and STORED_FORMATS.get(tensor.dtype) == INT4:
            blocks = [(widened if form == INT8 else with_zeros)(tensor.stored())]
        elif form == INT4_OFFSETS and STORED_FORMATS.get(tensor.dtype) == BLOCKS["Q4_K"]:
            blocks = [with_offsets(tensor.stored(), getattr(tensor, "name", ""))]
        elif tensor.dtype in BLOCKS and BLOCKS_IN_8_BITS.get(BLOCKS[tensor.dtype]) == form:
            blocks = [in_8_bits(tensor.stored(), getattr(tensor, "name", ""))]
        else:
            assert not form.offset_bits  # such matrices are only kept
            blocks = (quantize(chunk, form.bits, form.group) for chunk in tensor.chunks())
        for block in blocks:
            if not all(ready):  # those that are ready may have larger groups
                block = _regrouped(block, form.group)
            if whole is None:
                whole = block.each(lambda array: empty((rows, array.shape[1]), array.dtype))
            whole.values[first : first + block.shape[0]] = block.values
            whole.scales[first : first + block.shape[0]] = block.scales
            if whole.offsets is not None:
                whole.offsets[first : first + block.shape[0]] = block.offsets
            first += block.shape[0]
            tick()
    assert whole is not None  # no model has a matrix without rows
    return whole


def _regrouped(matrix: Quantized, group: int) -> Quantized:
    """The same weights in smaller groups, or in the same."""
    groups, times = -(-matrix.inputs // group), matrix.group // group
    values = matrix.values[:, : groups * group * matrix.bits // 8]
    scales = np.repeat(matrix.scales, times, axis=1)[:, :groups]
    offsets = None if matrix.offsets is None else np.repeat(matrix.offsets, times, axis=1)[:, :groups]
    return Quantized(values, scales, matrix.inputs, offsets)
