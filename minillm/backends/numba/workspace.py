"""Scratch memory of products, kept from call to call."""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray


class WorkSpace:
    """Named scratch arrays, kept from call to call."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}

    def take(self, name: str, size: int, dtype: Any) -> NDArray[Any]:
        """A flat array of at least `size` elements."""
        array = self.arrays.get(name)
        if array is None or len(array) < size:
            array = self.arrays[name] = np.empty(size, dtype)
        return array

    def rows(self, name: str, rows: int, columns: int, dtype: Any) -> NDArray[Any]:
        """An array [rows, columns]."""
        return self.take(name, rows * columns, dtype)[: rows * columns].reshape(rows, columns)


class _ThreadsWorkSpace(WorkSpace, threading.local):
    """One per Python thread."""


work = _ThreadsWorkSpace()
