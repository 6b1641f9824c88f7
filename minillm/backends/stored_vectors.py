"""The storage formats of the K/V cache: reading gives float32, writing rounds.

bfloat16 is rounded to the nearest and stored as the uint16 of its bits. int8 has a float32 scale for each position and
head, the largest magnitude / 127: an error of at most half a scale. A position with NaN or infinity gets the scale NaN,
so that reading it gives NaN.

int4 vectors are rotated (`reference/rotate.py`) and rounded in groups of 32, the last one filled with zeros. A group
has a float16 scale, by which its number of largest magnitude becomes -8, and 16 bytes as in `reference/quantize.py`:
4.5 bits a number. Numbers from 524,160 on are too large for such a scale, which is then NaN too.

Rotation was chosen by the perplexity of SmolLM2-135M (Q4_1, tests/real/alice.txt): of int4 keys alone +7.6 % plain and
+3.3 % rotated, of values alone +1.1 and +0.8 %.

So the reference operations work on every format; kernels read and write the same bits.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.quantize import pack, unpack
from ..reference.rotate import rotate
from .formats import BFLOAT16, Format
from .storage import expand, narrow

NEGLIGIBLE = np.float32(1e-36)
"""A vector with no larger number is stored as zeros in int8: the inverse of its scale would overflow."""
GROUP = 32
"""Numbers that share a scale in int4"""
WIDEST = 1024
"""The widest vector of int4 in `kernels/cpu/cache.c`"""


@dataclass(frozen=True, eq=False)
class StoredVectors:
    """Keys or values of all layers [L, pages, K, P, D], or of one layer; int4 in groups, [..., groups x 16]."""

    data: NDArray[Any]
    """float32, uint16 (bfloat16), int8, or uint8 (int4)"""
    scales: NDArray[Any] | None = None
    """One for each vector of `data` where that is int8, float32; for each group of it in int4, float16"""
    width: int = 0
    """D, of int4; 0: as `data` has"""

    @classmethod
    def empty(cls, shape: tuple[int, ...], form: Format) -> "StoredVectors":
        """Memory for vectors in a format of the cache."""
        if form.group:
            *most, width = shape
            groups = -(-width // form.group)
            data = reserve((*most, groups * form.group * form.bits // 8), form.dtype)
            return cls(data, reserve((*most, groups), np.float16), width)
        return cls(reserve(shape, form.dtype), reserve(shape[:-1], np.float32) if form.scale_bits else None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the vectors, [..., D]."""
        return (*self.data.shape[:-1], self.width) if self.width else self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.data.nbytes + (self.scales.nbytes if self.scales is not None else 0)

    def layer(self, layer: int) -> "StoredVectors":
        """The vectors of one layer."""
        return StoredVectors(self.data[layer], None if self.scales is None else self.scales[layer], self.width)

    def __getitem__(self, index: Any) -> NDArray[np.float32]:
        """Whole vectors as float32."""
        if self.width:
            assert self.scales is not None
            return from_int4(self.data[index], self.scales[index], self.width)
        vectors: NDArray[np.float32] = expand(self.data, index)
        return vectors if self.scales is None else vectors * self.scales[index][..., None]

    def __setitem__(self, index: Any, vectors: NDArray[Any]) -> None:
        """Round whole vectors [..., D] and store them."""
        if self.scales is not None:
            self.data[index], self.scales[index] = (to_int4 if self.width else to_int8)(vectors)
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


def to_int4(x: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Vectors [..., D] rotated and in groups of 32: [..., groups x 16], and their scales [..., groups]."""
    D = x.shape[-1]
    groups = -(-D // GROUP)
    grouped = np.zeros((*x.shape[:-1], groups * GROUP), np.float32)
    with np.errstate(all="ignore"):
        grouped[..., :D] = rotate(x)
        grouped = grouped.reshape(*x.shape[:-1], groups, GROUP)
        magnitudes = np.where(np.isnan(grouped), np.inf, np.abs(grouped))
        largest = np.take_along_axis(grouped, magnitudes.argmax(axis=-1)[..., None], axis=-1)  # -> [..., groups, 1]
        scales = (largest * np.float32(-0.125)).astype(np.float16)
        scales[~np.isfinite(scales)] = np.nan
        usable = np.isfinite(scales) & (scales != 0)
        inverse = np.divide(np.float32(1), scales.astype(np.float32), out=np.zeros_like(largest), where=usable)
        whole = np.rint(np.multiply(grouped, inverse, out=np.zeros_like(grouped), where=usable))
    integers = np.clip(whole, -8, 7).astype(np.int8).reshape(-1, groups * GROUP)
    packed = pack(np.ascontiguousarray(integers.T)).T  # [n, in'] -> [n, in' / 2]
    return packed.reshape(*x.shape[:-1], -1), np.where(usable | np.isnan(scales), scales, np.float16(0))[..., 0]


def from_int4(data: NDArray[np.uint8], scales: NDArray[np.float16], width: int) -> NDArray[np.float32]:
    """Vectors that `to_int4` has rounded. [..., groups x 16], [..., groups] -> [..., D]"""
    integers = unpack(data.reshape(-1, data.shape[-1])).reshape(*scales.shape, GROUP)
    with np.errstate(invalid="ignore"):
        numbers = integers * scales[..., None].astype(np.float32)
        return rotate(numbers.reshape(*scales.shape[:-1], -1)[..., :width])
