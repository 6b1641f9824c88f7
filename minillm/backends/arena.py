"""Memory for results, handed out in call order and reused in every step.

A forward pass asks for the same arrays in the same order each time. The arena keeps them, so a decode step allocates
nothing and addresses repeat from step to step. Each layer reuses the memory of the one before: only a layer's last
result, which the next one reads, stays valid. So a long prompt needs the memory of one layer rather than of all.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

_Place = tuple[int, bool]
"""Number of the call since `turn`, and whether its usual buffer holds the last layer's result, so that a second one is
used."""
_NOWHERE: _Place = (-1, False)


class Arena:
    """Reusable buffers, of float32 unless said otherwise."""

    def __init__(self, xp: Any, dtype: Any = np.float32, empty: Callable[[tuple[int, ...], Any], Any] | None = None):
        """Set the array module, the default dtype, and the allocator, which is `xp.empty` unless given."""
        self.dtype = np.dtype(dtype)
        self._empty = empty or xp.empty
        self._buffers: dict[_Place, Any] = {}  # flat, of bytes
        self._views: dict[_Place, Any] = {}  # the array last returned for each
        self.restart()

    def restart(self) -> None:
        """Begin a step: free all arrays. The order of buffers does not depend on what ran before."""
        self._next = 0
        self._last = self._kept = _NOWHERE

    def turn(self) -> None:
        """Begin the next layer: free all arrays except the one taken last."""
        self._next = 0
        self._kept = self._last

    def take(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """An uninitialised array, valid until the next `turn`; the last one of a layer until the turn after that."""
        place = self._next, self._kept == (self._next, False)
        self._next += 1
        self._last = place
        view = self._views.get(place)
        if view is not None and view.shape == shape and view.dtype == (dtype or self.dtype):
            return view
        return self._make(place, shape, np.dtype(dtype or self.dtype))

    def _make(self, place: _Place, shape: tuple[int, ...], dtype: Any) -> Any:
        size = math.prod(shape) * dtype.itemsize
        if place not in self._buffers or self._buffers[place].size < size:
            self._buffers[place] = self._empty((size,), np.uint8)
        self._views[place] = self._buffers[place][:size].view(dtype).reshape(shape)
        return self._views[place]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
