"""Memory for results, handed out in the order of the calls and used again in every step.

A forward pass asks for the same arrays in the same order each time. The arena keeps them, so a decode step allocates
nothing and addresses repeat from step to step. Two halves take turns, layer by layer: what a layer computed stays
valid until the next layer has ended, and a long prompt needs the memory of two layers rather than of all.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np


class Arena:
    """Reusable buffers, of float32 unless said otherwise."""

    def __init__(self, xp: Any, dtype: Any = np.float32, empty: Callable[[tuple[int, ...], Any], Any] | None = None):
        """Take the array module, the numbers' usual type, and what reserves memory: `xp.empty` unless given."""
        self.dtype = np.dtype(dtype)
        self._empty = empty or xp.empty
        self._halves: tuple[list[Any], list[Any]] = ([], [])  # flat buffers of bytes, one for each call since the turn
        self._views: tuple[list[Any], list[Any]] = ([], [])  # what each was asked for last
        self._half = 0
        self._next = 0

    def restart(self) -> None:
        """Begin a step anew: all arrays are free again, and come in the same order whatever ran before."""
        self._half = self._next = 0

    def turn(self) -> None:
        """Begin the next layer in the other half, whose arrays are free again."""
        self._half ^= 1
        self._next = 0

    def take(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """An uninitialised array, valid until the second `turn` from now."""
        views, index = self._views[self._half], self._next
        self._next += 1
        if index < len(views) and views[index].shape == shape and views[index].dtype == (dtype or self.dtype):
            return views[index]
        return self._make(index, shape, np.dtype(dtype or self.dtype))

    def _make(self, index: int, shape: tuple[int, ...], dtype: Any) -> Any:
        buffers, views = self._halves[self._half], self._views[self._half]
        size = math.prod(shape) * dtype.itemsize
        if index == len(buffers):
            buffers.append(self._empty((size,), np.uint8))
            views.append(None)
        elif buffers[index].size < size:
            buffers[index] = self._empty((size,), np.uint8)
        views[index] = buffers[index][:size].view(dtype).reshape(shape)
        return views[index]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for half in self._halves for buffer in half)
