"""The memory of a K/V cache: the layout of its pages, and its storage formats in NumPy.

Which sequence owns which page is decided in `cache/`.

bfloat16 is rounded to the nearest and stored as the uint16 of its bits. int8 has a float32 scale for each position and
head, the largest magnitude / 127: an error of at most half a scale. A position with NaN or infinity gets the scale NaN,
so that reading it gives NaN. Reading such vectors gives float32, writing rounds, so that the reference operations work
on every format; kernels read and write the same bits.
"""

import math
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import BFLOAT16, FLOAT32, Format
from .weights import expand, narrow

NEGLIGIBLE = np.float32(1e-36)
"""A vector with no larger number is stored as zeros in int8: the inverse of its scale would overflow."""

Shape = tuple[int, int, int, int, int]
"""[L, pages, K, P, D]"""


class Pages:
    """One model's keys and values, [L, pages, K, P, D] each, in the format of the backend that made them."""

    keys: Any
    values: Any
    first_layer = 0
    """Number of the first of the layers held, where a model is split into stages"""
    shared = False
    """True if all layers take turns in the memory of one, as they may where a pass computes whole texts: each layer
    then reads only what it has just written"""

    def __init__(self, xp: Any, shape: Shape, form: Format = FLOAT32) -> None:
        """Reserve the memory; on a CPU the system provides it as pages are first used."""
        empty = reserve if xp is np else xp.empty
        self.keys, self.values = (
            empty(shape, xp.float32) if form == FLOAT32 else StoredVectors.empty(shape, form) for _ in range(2)
        )

    @property
    def heads(self) -> int:
        """K"""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return int(self.keys.nbytes + self.values.nbytes)

    def layer(self, layer: int) -> tuple[Any, Any]:
        """One layer's keys and values, in a form that kernels and the reference take. 2 x [pages, K, P, D]"""
        index = 0 if self.shared else layer - self.first_layer
        if isinstance(self.keys, StoredVectors):
            return self.keys.layer(index), self.values.layer(index)
        return self.keys[index], self.values[index]

    def copy(self, source: int, target: int, positions: slice) -> None:
        """Copy some positions of a page to the same places of another, in all layers."""
        for stored in (self.keys, self.values):
            for array in (stored.data, stored.scales) if isinstance(stored, StoredVectors) else (stored,):
                if array is not None:
                    array[:, target, :, positions] = array[:, source, :, positions]


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
