"""Tensors stored in files, with two ways to read their values: memory mapping, or reading in chunks."""

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..backends.formats import STORED_FORMATS
from ..errors import CheckpointError, UnsupportedModelError
from ..files import opened
from ..progress import tick

CHUNK_BYTES = 2**19
"""Bytes read at once, so that rounding works in the processor's cache and in reused memory: with 4 MiB converting
opt-125m to bfloat16 takes three times as long, and with 1 MiB converting it to int4 takes 1 MB more."""
SHORT_BYTES = 512
"""A row of a range of columns that is shorter is read together with the gap that follows: a call costs more."""
_STORED: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # its bits: NumPy has no such type
    "float8_e4m3fn": np.dtype("<u1"),  # likewise
    "float8_e5m2": np.dtype("<u1"),
    "float8_e8m0fnu": np.dtype("<u1"),
    "int8": np.dtype("<i1"),
    "uint8": np.dtype("<u1"),
    "int32": np.dtype("<i4"),
    "uint32": np.dtype("<u4"),
    "int64": np.dtype("<i8"),
    "float64": np.dtype("<f8"),
}
FLOATS = ("float32", "float16", "bfloat16")
"""Stored types of weights that need no scales."""
FLOATS_8 = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
"""Stored types of weights, and of their scales, in 8 bits; see `values_of_bytes`."""
VALUES = (*FLOATS, *FLOATS_8)
"""Stored types that can be read as float32."""


@cache
def values_of_bytes(dtype: str) -> NDArray[np.float32]:
    """The value of each byte in one of `FLOATS_8`; float32 holds all of them exactly. [256]

    E4M3 (bias 7, no infinity) and E5M2 (bias 15) are those of Micikevicius et al., arXiv 2209.05433; E8M0, an exponent
    alone, is for scales (OCP Microscaling Formats, 2023).
    """
    byte = np.arange(256, dtype=np.int32)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (byte << 8).astype(np.uint16).view(np.float16).astype(np.float32)
    if dtype == "float8_e8m0fnu":
        return np.where(byte == 255, np.nan, np.ldexp(1.0, byte - 127)).astype(np.float32)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = np.ldexp(mantissa + np.where(exponent == 0, 0.0, 8.0), np.maximum(exponent, 1) - 10)
    return np.where(byte & 127 == 127, np.nan, np.where(byte < 128, magnitude, -magnitude)).astype(np.float32)


class WeightFile:
    """One weight file, open only while it is read.

    Raises:
        CheckpointError: the file cannot be read, or is a Git LFS pointer instead of weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self.opened() as file:
            self.size, self._changed = _state(file)
            if file.read(23) == b"version https://git-lfs":
                raise CheckpointError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")

    @contextmanager
    def opened(self) -> Iterator[BufferedReader]:
        """Open the file for reading; OS errors become CheckpointError."""
        with opened(self.path) as file:
            yield file

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on; the caller has checked both against `size`."""
        with self.opened() as file:
            file.seek(offset)
            data = file.read(count)
        if len(data) != count:
            raise self.shrank()
        return data

    @cached_property
    def mapping(self) -> mmap.mmap:
        """The whole file as read-only memory, shared by all arrays mapped from it."""
        with self.opened() as file:
            if file.seek(0, 2) < self.size:
                raise self.shrank()
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def release(self, start: int, stop: int) -> None:
        """Give back the memory of the mapping from byte `start` to `stop`; it is read again if it is used."""
        if "mapping" in vars(self) and hasattr(mmap, "MADV_DONTNEED"):
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self.mapping.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def check_unchanged(self) -> None:
        """Refuse a file modified since it was opened: the data read may be inconsistent.

        Raises:
            CheckpointError: its size or modification time has changed.
        """
        with self.opened() as file:
            size, changed = _state(file)
        if size < self.size:
            raise self.shrank()
        if (size, changed) != (self.size, self._changed):
            raise CheckpointError(f"{self.path} was changed while it was read: load the model again")

    def shrank(self) -> CheckpointError:
        """The error for a file that has become shorter since it was opened."""
        return CheckpointError(f"{self.path} is shorter than when it was opened ({self.size} bytes): was it replaced?")


def _state(file: BufferedReader) -> tuple[int, int]:
    """Size of a file in bytes, and its modification time in nanoseconds."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file, read lazily.

    `dtype` is the stored type. Floats of 32, 16 and 8 bits can be read as values, integers of some types as stored. A
    tensor of any other type can be listed, so that an unused buffer does no harm, and is refused when it is read.
    Values are returned as float32, which represents each value of these types exactly, or as stored.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: WeightFile
    offset: int  # of the first element, in bytes from the start of the file
    strides: tuple[int, ...]  # in elements; elements do not overlap, and all are within the file

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, shape={self.shape}, dtype={self.dtype!r}, file={self.file.path.name!r})"

    def map(self) -> NDArray[Any] | None:
        """The stored values as a read-only memory map, `shape`; None if not possible.

        Possible for a non-empty tensor in C order, aligned to its element size. bfloat16 comes as its bits, uint16, and
        floats of 8 bits as uint8.

        Raises:
            UnsupportedModelError: the stored type is none of those above.
            CheckpointError: the file cannot be read.
        """
        dtype = self._stored_type(tuple(_STORED))
        count = math.prod(self.shape)
        if not self._in_order() or self.offset % dtype.itemsize or count == 0:
            return None
        return np.frombuffer(self.file.mapping, dtype, count, self.offset).reshape(self.shape)

    def merged_with(self, other: Any) -> "StoredTensor | None":
        """This tensor and `other` concatenated by rows, if they are adjacent in the file; else None."""
        if not isinstance(other, StoredTensor) or other.file is not self.file or other.dtype != self.dtype:
            return None
        if other.dtype not in _STORED or other.shape[1:] != self.shape[1:]:
            return None
        end = self.offset + math.prod(self.shape) * _STORED[self.dtype].itemsize
        if not self._in_order() or not other._in_order() or other.offset != end:
            return None
        shape = (self.shape[0] + other.shape[0], *self.shape[1:])
        return replace(self, shape=shape, strides=c_strides(shape))

    def part(self, axis: int, first: int, stop: int) -> "StoredTensor":
        """Rows (axis 0) or columns (axis 1) `first` to `stop`; the rest of the tensor is not read.

        Raises:
            UnsupportedModelError: the stored type is none of those above.
        """
        offset = self.offset + first * self.strides[axis] * self._stored_type(tuple(_STORED)).itemsize
        return replace(self, shape=(*self.shape[:axis], stop - first, *self.shape[axis + 1 :]), offset=offset)

    def item(self, index: int) -> "StoredTensor":
        """Number `index` of the tensors that this one holds, without the first axis; the rest is not read.

        Raises:
            UnsupportedModelError: the stored type is none of those that can be read.
        """
        member = self.part(0, index, index + 1)
        return replace(member, shape=self.shape[1:], strides=self.strides[1:])

    def as_bytes(self) -> "StoredTensor":
        """The stored bytes of a contiguous column, as uint8. [n, 1] -> [n itemsize, 1]

        Raises:
            UnsupportedModelError: the stored type is none of those that can be read.
            CheckpointError: it is no contiguous column.
        """
        size = self._stored_type(tuple(_STORED)).itemsize
        if self.shape[1:] != (1,) or not self._in_order():
            raise CheckpointError(f"tensor {self.name!r} in {self.file.path} should be one contiguous column")
        return replace(self, dtype="uint8", shape=(self.shape[0] * size, 1), strides=(1, 1))

    def _in_order(self) -> bool:
        """True if the tensor is contiguous in C order."""
        return all(n == 1 or s == c for n, s, c in zip(self.shape, self.strides, c_strides(self.shape), strict=True))

    def read_into(self, out: NDArray[Any]) -> None:
        """Fill `out`, of this shape and any layout: float32 with the values, the stored type with the stored data.

        The file is never mapped. It is read directly into `out` if that has its layout and type, else in chunks of
        512 KiB: memory holds one chunk in addition to `out`.

        Raises:
            UnsupportedModelError: float32 values are wanted, and the stored type is not one of `VALUES`.
            CheckpointError: `out` has another shape, or the file cannot be read.
        """
        stored = self._stored_type(VALUES if out.dtype == np.float32 else tuple(_STORED))
        assert out.dtype in (np.float32, stored)
        if out.shape != self.shape:
            raise CheckpointError(
                f"tensor {self.name!r} in {self.file.path} has shape {list(self.shape)}, expected {list(out.shape)}"
            )
        if out.size == 0:
            return
        with self.file.opened() as file:
            if out.dtype == stored and out.flags.c_contiguous and self._in_order():
                file.seek(self.offset)
                if file.readinto(out.data) != out.nbytes:
                    raise self.file.shrank()
            else:
                chunk = np.empty(min(extent(self.shape, self.strides), CHUNK_BYTES // stored.itemsize), stored)
                self._fill(out, file, self.offset, chunk)

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """Iterate over the values as float32, some rows at a time; each chunk reuses the previous one's memory.

        Raises:
            UnsupportedModelError, CheckpointError: as `read_into`.
        """
        rows = max(1, CHUNK_BYTES // 4 // max(1, math.prod(self.shape[1:])))
        buffer = np.empty((min(rows, self.shape[0]), *self.shape[1:]), np.float32)
        step = self.strides[0] * self._stored_type().itemsize
        for first in range(0, self.shape[0], rows):
            count = min(rows, self.shape[0] - first)
            block = replace(self, shape=(count, *self.shape[1:]), offset=self.offset + first * step)
            block.read_into(buffer[:count])
            yield buffer[:count]

    def stored(self, types: Sequence[str] = FLOATS) -> NDArray[Any]:
        """The stored data, `shape`: a read-only memory map if possible, else a new array. See `map`.

        Args:
            types: accepted stored types; those that are not floats mean nothing alone.

        Raises:
            UnsupportedModelError: the stored type is none of them.
            CheckpointError: the file cannot be read.
        """
        dtype = self._stored_type(types)
        mapped = self.map()
        if mapped is not None:
            return mapped
        out = np.empty(self.shape, dtype)
        self.read_into(out)
        return out

    def load(self) -> NDArray[np.float32]:
        """The values as float32, `shape`: a read-only memory map if possible, else a new array.

        Raises:
            UnsupportedModelError, CheckpointError: as `read_into`.
        """
        self._stored_type()  # refuse before allocating memory
        mapped = self.map() if self.dtype == "float32" else None
        if mapped is not None:
            return mapped
        out = np.empty(self.shape, np.float32)
        self.read_into(out)
        return out

    def release(self) -> None:
        """Give back the memory of mapped pages, once the values have been copied."""
        if math.prod(self.shape):
            nbytes = extent(self.shape, self.strides) * _STORED[self.dtype].itemsize
            self.file.release(self.offset, self.offset + nbytes)

    def _stored_type(self, allowed: Sequence[str] = VALUES) -> np.dtype[Any]:
        if self.dtype not in allowed:
            raise UnsupportedModelError(
                f"tensor {self.name!r} in {self.file.path} is stored as {self.dtype}; "
                "minillm reads float32, float16 and bfloat16, and float8: convert the checkpoint to one of them"
            )
        return _STORED[self.dtype]

    def _fill(self, out: NDArray[np.float32], file: BufferedReader, offset: int, chunk: NDArray[Any]) -> None:
        """Read the part of the tensor that starts at byte `offset` and has `out`'s shape.

        A part that spans more of the file than `chunk` is split along its widest stride until each piece fits. Elements
        do not overlap, so neither do the pieces, and except for gaps the file is read once and in order. Wide gaps are
        not read: rows of a range of columns are read one by one.
        """
        span = extent(out.shape, self.strides)
        row = span - max(((n - 1) * stride for n, stride in zip(out.shape, self.strides, strict=True)), default=0)
        if span <= chunk.size and (span - out.size < row or row * chunk.itemsize < SHORT_BYTES):
            file.seek(offset)
            if file.readinto(chunk[:span].data) != span * chunk.itemsize:
                raise self.file.shrank()
            values = as_strided(chunk, out.shape, [stride * chunk.itemsize for stride in self.strides])
            if self.dtype == "bfloat16" and out.dtype == np.float32:  # the upper half of a float32
                values = np.left_shift(values, 16, dtype=np.uint32).view(np.float32)
            elif self.dtype in FLOATS_8 and out.dtype == np.float32:
                values = values_of_bytes(self.dtype)[values]
            with np.errstate(invalid="ignore"):  # a signalling NaN is not an error of the cast
                out[...] = values
            return
        axis = max((i for i, n in enumerate(out.shape) if n > 1), key=lambda i: self.strides[i])
        count, stride = out.shape[axis], self.strides[axis]
        rows = max(1, (chunk.size - row) // stride + 1) if span > chunk.size else 1
        for start in range(0, count, rows):
            piece = out[(slice(None),) * axis + (slice(start, start + rows),)]
            self._fill(piece, file, offset + start * stride * chunk.itemsize, chunk)


class ComputedTensor:
    """A tensor whose values are computed when they are read, some rows at a time: `chunks` says how."""

    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """The format that it counts as stored in, by its name in `STORED_FORMATS`."""
        raise NotImplementedError

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The values as float32, some rows at a time."""
        raise NotImplementedError

    def stored(self) -> Any:
        """The values in `dtype`."""
        out = np.empty(self.shape, STORED_FORMATS[self.dtype].dtype)
        self.read_into(out)
        return out

    def load(self) -> NDArray[np.float32]:
        """The values as float32."""
        out = np.empty(self.shape, np.float32)
        self.read_into(out)
        return out

    def read_into(self, out: NDArray[Any]) -> None:
        """Fill `out` with the values: as float32, or rounded to the 16 bits in which the tensor counts as stored."""
        first = 0
        for chunk in self.chunks():
            out[first : first + len(chunk)] = chunk if out.dtype == np.float32 else self.rounded(chunk)
            first += len(chunk)
            tick()

    def rounded(self, chunk: NDArray[np.float32]) -> NDArray[Any]:
        """Values as the numbers that `stored` has."""
        raise NotImplementedError

    def merged_with(self, other: Any) -> Any:
        """None: the values are in no file."""


class InFile(Protocol):
    """A tensor in a file."""

    @property
    def file(self) -> WeightFile: ...


def check_unchanged(tensors: Iterable[InFile]) -> None:
    """Check, after everything is read, that no file of these tensors has changed.

    Raises:
        CheckpointError: one was changed since it was opened.
    """
    for file in {tensor.file for tensor in tensors}:
        file.check_unchanged()


def is_count(number: object) -> TypeGuard[int]:
    """True if `number`, read from a file, is a valid count of elements or bytes."""
    return type(number) is int and 0 <= number < 2**60


def is_shape(numbers: object) -> bool:
    """True if `numbers`, read from a file, is a valid array shape."""
    return (
        isinstance(numbers, list | tuple)
        and len(numbers) <= 32
        and all(is_count(n) for n in numbers)
        and math.prod(max(n, 1) for n in numbers) < 2**60
    )


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of an array in C order: the last axis is contiguous."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements from the first to the last element of a non-empty view, both included."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
