"""Memory for results, handed out in the order of the calls and used again in every step.

A forward pass asks for the same arrays in the same order each time. The arena keeps them, so a decode step allocates
nothing and addresses repeat from step to step. Two halves take turns, layer by layer: what a layer computed stays
valid until the next layer has ended, and a long prompt needs the memory of two layers rather than of all.
"""

import math
from typing import Any


class Arena:
    """Reusable buffers of float32."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self._halves: tuple[list[Any], list[Any]] = ([], [])  # flat buffers, one for each call since the turn
        self._views: tuple[list[Any], list[Any]] = ([], [])  # the last shape each was asked for
        self._half = 0
        self._next = 0

    def turn(self) -> None:
        """Begin the next layer in the other half, whose arrays are free again."""
        self._half ^= 1
        self._next = 0

    def take(self, shape: tuple[int, ...]) -> Any:
        """An uninitialised float32 array, valid until the second `turn` from now."""
        views, index = self._views[self._half], self._next
        self._next += 1
        if index < len(views) and views[index].shape == shape:
            return views[index]
        return self._make(index, shape)

    def _make(self, index: int, shape: tuple[int, ...]) -> Any:
        buffers, views = self._halves[self._half], self._views[self._half]
        size = math.prod(shape)
        if index == len(buffers):
            buffers.append(self.xp.empty(size, self.xp.float32))
            views.append(None)
        elif buffers[index].size < size:
            buffers[index] = self.xp.empty(size, self.xp.float32)
        views[index] = buffers[index][:size].reshape(shape)
        return views[index]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for half in self._halves for buffer in half)
