"""Weights: a parameter in the layout of its backend (`storage.py` has the formats of its numbers)."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from .formats import LOGITS, Role
from .storage import expand


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter in the layout of its backend, opaque to all other code."""

    name: str
    """Its place in the model: "layers.3.fc1"."""
    data: Any
    """[out, in] of a projection, [V, E] of an embedding, [E] of a norm's gain; None for one without; or `Experts`"""
    bias: Any | None = None
    """[out]; of `Experts` [X, out]"""
    role: Role = "projection"
    first: int = 0
    """Row of the whole table that is this one's first, where ranks share a table"""

    @property
    def stop(self) -> int:
        """The row after its last, as `first`."""
        return self.first + self.shape[0]

    @cached_property
    def makes_logits(self) -> bool:
        """Whether its products are logits, which are always float32."""
        return self.role in LOGITS

    @cached_property
    def in_float32(self) -> bool:
        """Whether its numbers are used as they are stored."""
        return isinstance(self.data, np.ndarray) and bool(self.data.dtype == np.float32)

    def rows(self, ids: Any) -> Any:
        """Rows of a table, in float32. [T] -> [T, E]"""
        return self.data[ids] if self.in_float32 else expand(self.data, ids)

    def rows_of_share(self, ids: Any, xp: Any) -> Any:
        """As `rows`, of the ranks' part of a table: zeros for ids of others. [T] -> [T, E]"""
        here = (ids >= self.first) & (ids < self.stop)
        return xp.where(here[:, None], self.rows(xp.where(here, ids - self.first, 0)), xp.float32(0))

    def rows_from(self, first: int) -> "Weight":
        """The same table without its first rows, which are never looked up."""
        return replace(self, data=self.data[first:])

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of `data`, or of the numbers it encodes if it is quantised."""
        shape: tuple[int, ...] = self.data.shape
        return shape

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return sum(array.nbytes for array in (self.data, self.bias) if array is not None)
