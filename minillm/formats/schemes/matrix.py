"""A quantised matrix of a published checkpoint: several stored tensors, read as one.

    weight[o, i] = scale[o, g] x (number[o, i] - zero[o, g]),   g the group of column i, or with offsets
    weight[o, i] = scale[o, g] x (number[o, i] + 2**(bits - 1)) + offset[o, g]

Numbers are integers of 4 or 8 bits, or float8; a group is some neighbours in a row, or columns that a table lists. Each
scheme says where in its tensors the numbers, the scales and the zero points of a range of rows are; all else is here.

A matrix of integers whose groups and scales fit `reference/quantize.py` is read as such, exactly; with zero points or
offsets if it has 4 bits; one of codes that a block format has, in its blocks (`codebooks.py`). Any other is expanded:
each weight is computed in float32 and rounded once to the dtype that config.json names.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.formats import BLOCKS, FLOAT32, INT4, INT4_OFFSETS, INT4_ZEROS, INT8, STORED_FORMATS, Format
from ...backends.loader import CHUNK, Tensor
from ...backends.storage import expand, narrow
from ...config import Fields, ModelConfig
from ...errors import CheckpointError, UnsupportedModelError
from ...progress import tick
from ...reference.blocks import BLOCK_FORMATS, BlockMatrix
from ...reference.quantize import GROUPS, Quantized, pack
from ..tensors import FLOATS_8, VALUES, ComputedTensor, StoredTensor
from .minillm import check_columns

logger = logging.getLogger("minillm")

Rows = Callable[[int, int], NDArray[Any]]
"""(first, stop) -> numbers, scales or zero points of these rows [stop - first, ...]"""


@dataclass(frozen=True, eq=False, kw_only=True)
class Matrix:
    """A matrix [out, in]: numbers with scales and zero points."""

    name: str
    """Name of the weight"""
    shape: tuple[int, int]
    numbers: Rows
    """[n, in]: integers from -2**(bits - 1) on, or floats"""
    scales: Rows | None = None
    """[n, G] float32; None: all are 1"""
    zeros: Rows | None = None
    """[n, G] integers; None: all are 0"""
    offsets: Rows | None = None
    """[n, G] float32, of integers that count from 0 on; None: there are none"""
    size: int = 1
    """Neighbours in a row that form a group"""
    columns: Callable[[], NDArray[np.integer[Any]]] | None = None
    """The group of each column [in], where they are no neighbours"""
    bits: int = 0
    """Bits of an integer, 8 or 4; 0: the numbers are floats"""
    group: int = 32
    """Weights that share a scale in `Quantized`"""
    expanded: str = "float32"
    """The dtype of the weights where they are exact in no format"""
    block: str = ""
    """The block format that holds the same weights (`codebooks.py`), if there is one"""
    blocks: Rows | None = None
    """[n, bytes of a row] in that format"""

    @cached_property
    def dtype(self) -> str:
        """The name in `STORED_FORMATS` of the format it is read as. Scales and zero points are looked through once."""
        form = self._kept_format()
        return self.expanded if form is None else form.name

    def values(self, first: int, stop: int) -> NDArray[np.float32]:
        """The weights of rows `first` to `stop`, in float32. [stop - first, in]"""
        values = self.numbers(first, stop).astype(np.float32)
        with np.errstate(all="ignore"):  # damaged scales are infinite or NaN; the model's results say so
            if self.zeros is not None:
                values -= self._by_column(self.zeros(first, stop))
            if self.offsets is not None:
                values += 2 ** (self.bits - 1)
            if self.scales is not None:
                values *= self._by_column(self.scales(first, stop))
            if self.offsets is not None:
                values += self._by_column(self.offsets(first, stop))
        return values

    def _by_column(self, groups: NDArray[Any]) -> NDArray[Any]:
        """Repeat the scale or zero point of a group for each of its columns. [n, G] -> [n, in]"""
        if self.columns is not None:
            return groups[:, self._checked_columns(groups.shape[1])]
        return np.repeat(groups, self.size, axis=1)[:, : self.shape[1]]

    def _checked_columns(self, groups: int) -> NDArray[np.integer[Any]]:
        assert self.columns is not None
        columns = self.columns()
        if columns.size and not 0 <= int(columns.min()) <= int(columns.max()) < groups:
            raise CheckpointError(
                f"tensor {self.name}: the groups of its columns should be from 0 to {groups - 1}, found "
                f"{int(columns.min())} to {int(columns.max())}"
            )
        return columns

    def _kept_format(self) -> Format | None:
        """The format that holds the same weights; None if there is none."""
        if self.block:
            return BLOCKS[self.block]
        outputs, inputs = self.shape
        if not self.bits or self.scales is None or (self.size % self.group and self.size < inputs):
            return None
        if self.columns is not None and not np.array_equal(self.columns(), np.arange(inputs) // self.size):
            return None
        if self.offsets is not None and self.bits == 8:
            return None
        symmetric = True
        rows = max(1, CHUNK * self.size // max(1, inputs))
        for first in range(0, outputs, rows):
            stop = min(first + rows, outputs)
            if self.zeros is not None and (zeros := self.zeros(first, stop)).any():
                symmetric = False
                if self.bits == 8 or zeros.min() < -8 or zeros.max() > 7:
                    return None
            parts = [self.scales(first, stop)] + ([self.offsets(first, stop)] if self.offsets is not None else [])
            with np.errstate(over="ignore", invalid="ignore"):
                if any(not np.isfinite(part).all() or (part.astype(np.float16) != part).any() for part in parts):
                    return None
        if self.offsets is not None:
            return INT4_OFFSETS
        return INT8 if self.bits == 8 else INT4 if symmetric else INT4_ZEROS


@dataclass(frozen=True, eq=False)
class MatrixTensor(ComputedTensor):
    """Rows and columns of a `Matrix` as a tensor, read on demand in chunks of rows."""

    matrix: Matrix
    rows: tuple[int, int]
    """The first, and the one after the last"""
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        """[rows, columns]."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def dtype(self) -> str:
        """Its name in `STORED_FORMATS`."""
        return self.matrix.dtype

    def stored(self) -> Any:
        """The integers, scales and zero points, blocks, or the weights in their dtype; bfloat16 as its bits."""
        if self.matrix.block:
            return self._blocks()
        return self._integers() if STORED_FORMATS[self.dtype].scale_bits else super().stored()

    def read_into(self, out: NDArray[Any]) -> None:
        """Fill `out` with the weights: as float32, or in their dtype."""
        first = 0
        for chunk in self.chunks() if out.dtype == np.float32 else self._rounded():
            out[first : first + len(chunk)] = chunk
            first += len(chunk)
            tick()

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The weights as float32, in chunks of rows."""
        return map(expand, self._rounded())

    def part(self, axis: int, first: int, stop: int) -> "MatrixTensor":
        """Rows (axis 0) or columns (axis 1) `first` to `stop`; columns that are no whole blocks are expanded.

        Raises:
            ParameterError: a range of columns that begins or ends within a group of `Quantized`.
        """
        if axis == 0:
            return replace(self, rows=(self.rows[0] + first, self.rows[0] + stop))
        if STORED_FORMATS[self.dtype].scale_bits:
            block = BLOCK_FORMATS.get(self.matrix.block)
            if block is not None and (first % block.numbers or stop % block.numbers):
                return replace(self, matrix=replace(self.matrix, block="", blocks=None)).part(axis, first, stop)
            if block is None:
                check_columns(self.matrix.name, first, stop, self.shape[1], self.matrix.group)
        return replace(self, columns=(self.columns[0] + first, self.columns[0] + stop))

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows that are read at a time."""
        rows = max(1, CHUNK // max(1, self.matrix.shape[1]))
        return ((first, min(first + rows, self.rows[1])) for first in range(*self.rows, rows))

    def _rounded(self) -> Iterator[NDArray[Any]]:
        """The weights in chunks of rows: float32, or in 16 bits where that is their dtype."""
        form = STORED_FORMATS[self.dtype]
        for first, stop in self._ranges():
            values = self.matrix.values(first, stop)[:, slice(*self.columns)]
            yield values if form.scale_bits or form == FLOAT32 else narrow(values, form)

    def _blocks(self) -> BlockMatrix:
        """The same weights in blocks."""
        form, blocks = BLOCK_FORMATS[self.matrix.block], self.matrix.blocks
        assert blocks is not None
        columns = slice(*(column // form.numbers * form.bytes for column in self.columns))
        rows = [blocks(first, stop)[:, columns] for first, stop in self._ranges()]
        width = form.row_bytes(self.shape[1])
        return BlockMatrix(np.concatenate(rows) if rows else np.empty((0, width), np.uint8), form)

    def _integers(self) -> Quantized:
        """The same integers, padded to whole groups, their scales, and their zero points or offsets."""
        matrix, bits, group = self.matrix, self.matrix.bits, self.matrix.group
        assert matrix.scales is not None
        (outputs, inputs), start = self.shape, self.rows[0]
        groups = -(-inputs // group)
        values = np.empty((outputs, groups * group * bits // 8), np.int8 if bits == 8 else np.uint8)
        scales = np.empty((outputs, groups), np.float16)
        form = STORED_FORMATS[self.dtype]
        offsets = np.empty((outputs, groups), form.offset_dtype) if form.offset_bits else None
        shared = (self.columns[0] + np.arange(groups) * group) // matrix.size  # the group in the file of each of ours
        for first, stop in self._ranges():
            rows = slice(first - start, stop - start)
            padded = np.zeros((stop - first, groups * group), np.int8)
            padded[:, :inputs] = matrix.numbers(first, stop)[:, slice(*self.columns)]
            values[rows] = padded if bits == 8 else pack(np.ascontiguousarray(padded.T)).T  # [n, in'] -> [n, in' / 2]
            scales[rows] = matrix.scales(first, stop)[:, shared]
            if offsets is not None and matrix.offsets is not None:
                offsets[rows] = matrix.offsets(first, stop)[:, shared]
            elif offsets is not None:
                assert matrix.zeros is not None
                offsets[rows] = matrix.zeros(first, stop)[:, shared] + 8
        return Quantized(values, scales, inputs, offsets)


class Module:
    """The stored tensors of one module, a projection or an embedding, checked as they are taken."""

    def __init__(self, name: str, stored: Mapping[str, StoredTensor], scheme: str) -> None:
        self.name, self._stored, self._scheme = name, stored, scheme
        self.used: set[str] = set()
        """Names of the tensors taken so far"""

    def __contains__(self, part: str) -> bool:
        return f"{self.name}.{part}" in self._stored

    def shape_of(self, part: str) -> tuple[int, ...] | None:
        """The shape of the tensor NAME.part; None if there is none."""
        tensor = self._stored.get(f"{self.name}.{part}")
        return None if tensor is None else tensor.shape

    def take(self, part: str, types: tuple[str, ...], *shape: int | None) -> StoredTensor:
        """The tensor NAME.part, of one of these types and this shape, in which None is any size.

        Raises:
            CheckpointError: it is missing, or has another type or shape.
        """
        name = f"{self.name}.{part}"
        if name not in self._stored:
            raise CheckpointError(f"the checkpoint lacks tensor {name}, which {self._scheme} needs for {self.name}")
        tensor = self._stored[name]
        fits = len(tensor.shape) == len(shape) and all(w in (None, n) for n, w in zip(tensor.shape, shape, strict=True))
        if tensor.dtype not in types or not fits:
            expected = ", ".join("any" if size is None else str(size) for size in shape)
            raise CheckpointError(
                f"tensor {name} should be {' or '.join(types)} of shape [{expected}] by {self._scheme}, found "
                f"{tensor.dtype} of shape {list(tensor.shape)}"
            )
        self.used.add(name)
        return tensor

    def leave(self, *parts: str) -> None:
        """Leave tensors out: they describe what is not done here, such as the rounding of activations."""
        self.used |= {f"{self.name}.{part}" for part in parts if part in self}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The quantisation of a published checkpoint, by its quantization_config."""

    title: str
    """For people: "GPTQ, 4 bits, groups of 128" """
    dtype: str
    """The dtype, in `STORED_FORMATS`, that most projections are read as, as far as config.json tells"""
    group: int = 32
    """Weights that share a scale where that is 8 or 4 bits"""
    expanded: str
    """The dtype of a matrix that is not exact in 8 or 4 bits"""
    note: str = ""
    """The difference from the original's results, if there is one"""
    markers: tuple[str, ...]
    """Parts of the names of tensors that only quantised modules have"""
    matrix: Callable[[Module], Matrix]
    """Reads a module"""
    apart: Callable[[Mapping[str, StoredTensor]], Mapping[str, StoredTensor]] = dict
    """Tensors of all experts -> of each"""
    keeps_vocabulary = True
    """The embedding has the checkpoint's dtype"""
    as_built = False
    """Tensors have their published names and order"""
    published = True

    def check_dtype(self, dtype: str) -> None:
        """Accept any dtype: the matrices can be rounded anew."""

    def join(self, stored: Mapping[str, StoredTensor], config: ModelConfig | None = None) -> dict[str, Tensor]:
        """One tensor for each quantised matrix, NAME.weight; all other tensors as they are. Needs no configuration.

        Raises:
            CheckpointError: a part of a matrix is missing, or has the wrong type or shape.
        """
        stored = self.apart(stored)
        endings = tuple(f".{marker}" for marker in self.markers)
        names = {name.removesuffix(end): None for name in stored for end in endings if name.endswith(end)}
        joined: dict[str, Tensor] = {}
        used: set[str] = set()
        for name in names:
            module = Module(name, stored, self.title)
            matrix = replace(self.matrix(module), group=self.group, expanded=self.expanded)
            joined[f"{name}.weight"] = MatrixTensor(matrix, (0, matrix.shape[0]), (0, matrix.shape[1]))
            used |= module.used
        rest = {name: tensor for name, tensor in stored.items() if name not in used}
        for name, tensor in rest.items():
            if tensor.dtype in FLOATS_8:
                raise CheckpointError(f"the checkpoint lacks scales for tensor {name}, stored as {tensor.dtype}")
        return rest | joined

    def log(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Say in one line what the matrices were read as: a warning if they take more memory, or results differ."""
        matrices = [tensor for tensor in tensors.values() if isinstance(tensor, MatrixTensor)]
        counts = {dtype: sum(tensor.dtype == dtype for tensor in matrices) for dtype in STORED_FORMATS}
        parts = [
            f"{count} matrices {'kept exactly as' if STORED_FORMATS[dtype].scale_bits else 'expanded to'} {dtype}"
            for dtype, count in counts.items()
            if count
        ]
        as_it_is = not self.note and not any(not STORED_FORMATS[tensor.dtype].scale_bits for tensor in matrices)
        logger.log(
            logging.INFO if as_it_is else logging.WARNING,
            "%s: quantised by %s; %s",
            folder,
            self.title,
            "; ".join([", ".join(parts) or "none of its matrices is", *filter(None, [self.note])]),
        )


def unpack_words(words: NDArray[np.int32], bits: int) -> NDArray[np.int8]:
    """Integers packed in words of 32 bits, lowest bits first, less 2**(bits - 1). [n, w] -> [n, 32 w / bits]"""
    packed = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return packed.view(np.int8) - np.int8(8) if bits == 4 else (packed ^ np.uint8(128)).view(np.int8)


def rows_of(tensor: StoredTensor, height: int = 1) -> Rows:
    """Scales or zero points of rows, from a tensor [out / height, G], [out / height] or of a single number. [n, G]

    Floats come as float32, integers as they are stored.
    """

    def read(stored_tensor: StoredTensor) -> NDArray[Any]:
        return stored_tensor.load() if stored_tensor.dtype in VALUES else stored_tensor.stored((stored_tensor.dtype,))

    def rows(first: int, stop: int) -> NDArray[Any]:
        if math.prod(tensor.shape) == 1:
            return np.broadcast_to(read(tensor).reshape(1, 1), (stop - first, 1))
        blocks = np.arange(first, stop) // height
        stored = read(tensor.part(0, int(blocks[0]), int(blocks[-1]) + 1))
        shared: NDArray[Any] = stored.reshape(len(stored), -1)[blocks - blocks[0]]
        return shared

    return rows


def common_group(sizes: list[int]) -> int:
    """Weights that share a scale in `Quantized`, for groups of these sizes; -1 or 0: whole rows."""
    return GROUPS[-1] if all(size <= 0 or size % GROUPS[-1] == 0 for size in sizes) else GROUPS[0]


def integers_dtype(bits: int, *, symmetric: bool) -> str:
    """The dtype of integers of 8 or 4 bits that are kept; 8 bits are symmetric."""
    return (INT8 if bits == 8 else INT4 if symmetric else INT4_ZEROS).name


def read_bits(fields: Fields, name: str = "bits", known: tuple[int, ...] = (4, 8)) -> int:
    """The number of bits of a weight."""
    bits = fields.size(name)
    if bits not in known:
        raise UnsupportedModelError(f"{fields.source}: {name} is {bits}; minillm reads {' and '.join(map(str, known))}")
    return bits


def read_group_size(fields: Fields, default: int | None = None) -> int:
    """The number of weights in a group; -1: a whole row."""
    if fields.raw.get("group_size") == -1:
        return -1
    return fields.size("group_size", default)
