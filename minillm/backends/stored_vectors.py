"""The storage formats of the K/V cache: reading gives float32, writing rounds.

bfloat16 is rounded to the nearest and stored as the uint16 of its bits. int8 has a float32 scale for each position and
head, the largest magnitude / 127: an error of at most half a scale. A position with NaN or infinity gets the scale NaN,
so that reading it gives NaN. So the reference operations work on every format; kernels read and write the same bits.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import BFLOAT16, Format
from .weights import expand, narrow

NEGLIGIBLE = np.float32(1e-36)
"""A vector with no larger number is stored as zeros in int8: the inverse of its scale would overflow."""


@dataclass(frozen=True, eq=False)
class StoredVectors:
    """Keys or values of all layers [L, pages, K, P, D], or of one layer."""

    data: NDArray[Any]
    """float32, uint16 (bfloat16) or int8"""
    scales: NDArray[np.float32] | None = None
    """One for each vector of `data`, where that is int8."""

    @classmethod
    def empty(cls, shape: tuple[int, ...], form: Format) -> "StoredVectors":
        """Memory for vectors in a format of the cache."""
        return cls(reserve(shape, form.dtype), reserve(shape[:-1], np.float32) if form.scale_bits else None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `data`."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.data.nbytes + (self.scales.nbytes if self.scales is not None else 0)

    def layer(self, layer: int) -> "StoredVectors":
        """The vectors of one layer."""
        return StoredVectors(self.data[layer], None if self.scales is None else self.scales[layer])

    def __getitem__(self, index: Any) -> NDArray[np.float32]:
        """Whole vectors as float32."""
        vectors: NDArray[np.float32] = expand(self.data, index)
        return vectors if self.scales is None else vectors * self.scales[index][..., None]

    def __setitem__(self, index: Any, vectors: NDArray[Any]) -> None:
        """Round whole vectors [..., D] and store them."""
        if self.scales is not None:
            self.data[index], self.scales[index] = to_int8(vectors)
        elif self.data.dtype == np.uint16:
            self.data[index] = narrow(np.ascontiguousarray(vectors, np.float32), BFLOAT16)
        else:
            self.data[index] = vectors


def reserve(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array in host memory that the system provides in small pages as they are first used.

    NumPy would ask for huge pages of 2 MB: the first tokens of a sequence would take two of them in each layer, 48 MB
    for opt-125m where 5 suffice.

    Raises:
        MemoryError: the system does not have that much.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if not size or not hasattr(mmap, "MADV_NOHUGEPAGE"):  # only Linux has such pages
        return np.empty(shape, dtype)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes for a K/V cache: {error.strerror}") from None
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


def trim(array: Any, pages: Sequence[int]) -> bool:
    """Give the memory of some pages of an array [L, pages, ...] back to the system.

    It has pages of its own: those that lie in these pages, and in no others, read as zeros then, and are provided anew
    when they are written to.

    Returns:
        False if the array keeps memory: `reserve` has not asked the system for it, or it is locked.
    """
    memory = _mapping_of(array)
    if memory is None:
        return not array.size
    L, count = array.shape[:2]
    size = len(memory) // (L * count)
    for first, stop in _runs(sorted(pages)):
        for start in range(first * size, L * count * size, count * size):
            begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (start + (stop - first) * size) // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                try:
                    memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)
                except OSError:
                    return False
    return True


def _mapping_of(array: Any) -> mmap.mmap | None:
    """The memory that `reserve` has asked the system for, all of which an array has."""
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    memory = base.obj if isinstance(base, memoryview) else None
    return memory if isinstance(memory, mmap.mmap) and len(memory) == array.nbytes else None


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first number and the one after the last of each run of successive ones."""
    for _, run in groupby(enumerate(numbers), lambda numbered: numbered[1] - numbered[0]):
        successive = [number for _, number in run]
        yield successive[0], successive[-1] + 1


def to_int8(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Vectors [..., D] as int8 and a scale for each [...]."""
    largest = np.abs(x).max(axis=-1)
    usable = (largest > NEGLIGIBLE) & np.isfinite(largest)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=usable)
    whole = np.rint(np.multiply(x, inverse[..., None], out=np.zeros_like(x), where=usable[..., None]))
    scales = np.where(
        usable, largest / np.float32(127), np.where(np.isfinite(largest), np.float32(0), np.float32(np.nan))
    )
    return whole.astype(np.int8), scales
