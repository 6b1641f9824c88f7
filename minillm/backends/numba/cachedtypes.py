"""How numbers of a K/V cache may be stored: float32, bfloat16 or int8, in NumPy. Kernels read and write the same bits.

bfloat16 is the upper half of a float32, rounded to the nearest (of two equally near ones the even), kept as uint16.
int8 has a float32 scale for each position and head, the largest magnitude / 127: an error of at most half a scale. A
position with NaN or infinity in it gets the scale NaN, so it is found where it is read.

The reference operations work on such a cache too: what is read from `StoredPages` is float32, what is written is
rounded.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ParameterError

STORAGE: dict[str, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
"""Cache dtype -> type of the array that holds it."""


def bytes_per_vector(D: int, dtype: str) -> int:
    """What one key or value of one head takes."""
    check_cache_dtype(dtype)
    return D * np.dtype(STORAGE[dtype]).itemsize + (4 if dtype == "int8" else 0)


def check_cache_dtype(dtype: str) -> None:
    """Raise `ParameterError` for a type that no cache has."""
    if dtype not in STORAGE:
        raise ParameterError(f"a K/V cache's dtype should be one of {', '.join(STORAGE)}, found {dtype!r}")


@dataclass(frozen=True, eq=False)
class StoredPages:
    """Keys or values of one layer [pages, K, P, D], or of all layers [L, pages, K, P, D]."""

    data: NDArray[Any]
    """float32, uint16 (bfloat16) or int8"""
    scales: NDArray[np.float32] | None = None
    """One for each vector of `data`, of an int8 cache."""

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: str) -> "StoredPages":
        """Reserve memory.

        Raises:
            ParameterError: no cache has this dtype.
        """
        check_cache_dtype(dtype)
        return cls(np.empty(shape, STORAGE[dtype]), np.empty(shape[:-1], np.float32) if dtype == "int8" else None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `data`."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.data.nbytes + (self.scales.nbytes if self.scales is not None else 0)

    def layer(self, index: int) -> "StoredPages":
        """One layer's pages, of those of all layers."""
        return StoredPages(self.data[index], None if self.scales is None else self.scales[index])

    def copy(self, source: int, target: int, part: slice) -> None:
        """Copy some positions of a page to another page, in all layers."""
        for array in (self.data, self.scales):
            if array is not None:
                array[:, target, :, part] = array[:, source, :, part]

    def __getitem__(self, index: Any) -> NDArray[np.float32]:
        """Whole vectors as float32."""
        found = self.data[index]
        if self.data.dtype == np.uint16:
            return np.asarray((found.astype(np.uint32) << 16).view(np.float32))
        if self.scales is None:
            return np.asarray(found)
        return np.asarray(found * self.scales[index][..., None])

    def __setitem__(self, index: Any, vectors: NDArray[np.float32]) -> None:
        """Round whole vectors [..., D] and store them."""
        if self.data.dtype == np.uint16:
            self.data[index] = to_bfloat16(vectors)
        elif self.scales is None:
            self.data[index] = vectors
        else:
            self.data[index], self.scales[index] = to_int8(vectors)


def to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bfloat16, of two equally near ones the even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | np.uint32(0x40), rounded).astype(np.uint16)


def to_int8(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Vectors [..., D] as int8 and a scale for each [...]."""
    largest = np.abs(x).max(axis=-1)
    usable = (largest > 0) & np.isfinite(largest)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=usable)
    whole = np.rint(np.multiply(x, inverse[..., None], out=np.zeros_like(x), where=usable[..., None]))
    return whole.astype(np.int8), np.where(np.isfinite(largest), largest / np.float32(127), np.float32(np.nan))
