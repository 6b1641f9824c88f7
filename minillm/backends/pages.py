"""The memory of a K/V cache and the layout of its pages. Which sequence owns which page is decided in `cache/`."""

import math
import mmap
from typing import Any

import numpy as np


class Pages:
    """One model's keys and values, [L, pages, K, P, D] each, in the format of the backend that made them."""

    def __init__(self, xp: Any, shape: tuple[int, int, int, int, int], dtype: Any) -> None:
        """Reserve the memory; on a CPU the system provides it as pages are first used."""
        empty = reserve if xp is np else xp.empty
        self.keys = empty(shape, dtype)  # [L, pages, K, P, D]
        self.values = empty(shape, dtype)  # [L, pages, K, P, D]

    @property
    def heads(self) -> int:
        """K"""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return int(self.keys.nbytes + self.values.nbytes)

    def layer(self, layer: int) -> tuple[Any, Any]:
        """One layer's keys and values, in a form the reference can compute with. 2 x [pages, K, P, D]"""
        return self.keys[layer], self.values[layer]

    def copy(self, source: int, target: int, part: slice) -> None:
        """Copy some positions of a page to the same places of another, in all layers."""
        self.keys[:, target, :, part] = self.keys[:, source, :, part]
        self.values[:, target, :, part] = self.values[:, source, :, part]


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
