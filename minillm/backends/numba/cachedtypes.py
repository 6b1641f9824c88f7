"""Storage formats of a K/V cache: float32, bfloat16 or int8, in NumPy. Kernels read and write the same bits.

bfloat16 is rounded to the nearest and stored as the uint16 of its bits. int8 has a float32 scale for each position and
head, the largest magnitude / 127: an error of at most half a scale. A position with NaN or infinity gets the scale NaN,
so that reading it gives NaN.

The reference operations work on such a cache too: reading `StoredVectors` gives float32, writing rounds.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..pages import Pages, reserve
from ..weights import expand, narrow

STORAGE: dict[str, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
"""Cache dtype -> type of the array that holds it."""
NEGLIGIBLE = np.float32(1e-36)
"""A vector with no larger number is stored as zeros in int8: the inverse of its scale would overflow."""


def position_bytes(K: int, D: int, dtype: str) -> int:
    """Bytes that one position's keys and values take in one layer."""
    return 2 * K * (D * np.dtype(STORAGE[dtype]).itemsize + (4 if dtype == "int8" else 0))


@dataclass(frozen=True, eq=False)
class StoredVectors:
    """Keys or values, [L, pages, K, P, D] or those of one layer."""

    data: NDArray[Any]
    """float32, uint16 (bfloat16) or int8"""
    scales: NDArray[np.float32] | None = None
    """One for each vector of `data`, where that is int8."""

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: str) -> "StoredVectors":
        """Memory for vectors of a cache dtype."""
        return cls(reserve(shape, STORAGE[dtype]), reserve(shape[:-1], np.float32) if dtype == "int8" else None)

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

    def __setitem__(self, index: Any, vectors: NDArray[np.float32]) -> None:
        """Round whole vectors [..., D] and store them."""
        if self.scales is not None:
            self.data[index], self.scales[index] = to_int8(vectors)
        elif self.data.dtype == np.uint16:
            self.data[index] = narrow(np.ascontiguousarray(vectors), "bfloat16")
        else:
            self.data[index] = vectors


class StoredPages(Pages):
    """One model's keys and values in a cache dtype."""

    def __init__(self, shape: tuple[int, int, int, int, int], dtype: str) -> None:
        """Reserve memory for [L, pages, K, P, D]; the system provides it as pages are first used."""
        self.keys = StoredVectors.empty(shape, dtype)
        self.values = StoredVectors.empty(shape, dtype)
        self._layers = [(self.keys.layer(i), self.values.layer(i)) for i in range(shape[0])]  # asked for in every step

    def layer(self, layer: int) -> tuple[StoredVectors, StoredVectors]:
        """One layer's keys and values, in a form that kernels and the reference take. 2 x [pages, K, P, D]"""
        return self._layers[layer]

    def copy(self, source: int, target: int, part: slice) -> None:
        """Copy some positions of a page to the same places of another, in all layers."""
        for stored in (self.keys, self.values):
            for array in (stored.data, stored.scales):
                if array is not None:
                    array[:, target, :, part] = array[:, source, :, part]


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
