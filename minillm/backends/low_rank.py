"""LoRA adapters of single requests: the weights of an adapter, and a backend that adds them to each projection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..batch import Batch
from .observe import WrappedBackend
from .operations import Backend
from .weights import Weight


@dataclass(frozen=True, eq=False)
class LowRankWeight:
    """The change of one projection, as its backend's memory holds it."""

    down: Weight
    """A [r, in], float32"""
    up: Weight
    """B [out, r], float32, with the scale in it"""


AdapterWeights = Mapping[str, LowRankWeight]
"""Name of a projection -> its change."""


def adapted(
    backend: Backend, adapters: Mapping[str, AdapterWeights], batch: Batch, rows: Sequence[int]
) -> tuple[Backend, Backend]:
    """Backends for a batch with adapters: for its layers [T], and for the head [R], which gets some of the rows."""
    pairs = zip(batch.spans, batch.adapters, strict=True)
    names = [name for span, name in pairs for _ in range(span.start, span.stop)]
    return AdaptedBackend(backend, adapters, names), AdaptedBackend(backend, adapters, [names[row] for row in rows])


class AdaptedBackend(WrappedBackend):
    """Adds to each projection what the adapters of its rows change.

    Every other operation is the wrapped backend's, in which observers see the products and the additions apart.
    """

    only_looks = True  # texts of different adapters share no pages in any case

    def __init__(self, inner: Backend, adapters: Mapping[str, AdapterWeights], of_rows: Sequence[str | None]) -> None:
        """Set the adapters by name, and the name of each row's adapter, or None. [T]"""
        super().__init__(inner)
        self.replays = inner.replays and inner.memory.records_adapters and not isinstance(inner, WrappedBackend)
        self._adapters, self._of_rows = adapters, of_rows
        self._numbers = inner.memory.adapter_numbers if self.replays else None
        if self._numbers is not None:
            for name in adapters:
                self._numbers.setdefault(name, len(self._numbers))

    @cached_property
    def _groups(self) -> list[tuple[Any, AdapterWeights]]:
        """The rows and weights of each adapter that has rows; where adapters are numbered, of all, by number."""
        names = np.asarray(self._of_rows, object)
        if self._numbers is not None:  # the backend sends the rows, if it needs them
            return [(np.flatnonzero(names == name), self._adapters.get(name, {})) for name in self._numbers]
        present = dict.fromkeys(name for name in names.tolist() if name is not None)
        return [(self.inner.xp.asarray(np.flatnonzero(names == name)), self._adapters[name]) for name in present]

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """activation(x W^T + b + (x A^T) B^T) + residual, with the A and B of each row. [T, in] -> [T, out]"""
        parts = [(rows, adapter.get(weight.name)) for rows, adapter in self._groups]
        if self._numbers is None:
            parts = [(rows, change) for rows, change in parts if change is not None]
        if all(change is None for _, change in parts):
            return self.inner.linear(x, weight, activation=activation, residual=residual)
        y = self.inner.linear(x, weight)  # [T, in] -> [T, out]
        return self.inner.add_low_rank(y, x, parts, activation=activation, residual=residual)
