"""LoRA adapters of single requests: the weights of an adapter, and a backend that adds them to each projection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """The backends of a batch's layers [T] and of the head [R], whose `rows` are some of it: adapted, if need be."""
    if not batch.adapters:
        return backend, backend
    pairs = zip(batch.spans, batch.adapters, strict=True)
    names = [name for span, name in pairs for _ in range(span.start, span.stop)]
    return AdaptedBackend(backend, adapters, names), AdaptedBackend(backend, adapters, [names[row] for row in rows])


class AdaptedBackend(WrappedBackend):
    """Adds to each projection what the adapters of its rows change.

    Every other operation is that of the wrapped backend, in which observers see the products and the additions apart.
    """

    def __init__(self, inner: Backend, adapters: Mapping[str, AdapterWeights], of_rows: Sequence[str | None]) -> None:
        """Set the adapters by name, and the name of each row's adapter, or None. [T]"""
        super().__init__(inner)
        self.replays = inner.replays and inner.memory.records_adapters and not isinstance(inner, WrappedBackend)
        names = np.asarray(of_rows, object)
        self._groups = [
            (inner.xp.asarray(np.flatnonzero(names == name)), adapters[name])
            for name in dict.fromkeys(name for name in names.tolist() if name is not None)
        ]

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """activation(x W^T + b + (x A^T) B^T) + residual, with the A and B of each row. [T, in] -> [T, out]"""
        parts = [(rows, adapter[weight.name]) for rows, adapter in self._groups if weight.name in adapter]
        if not parts:
            return self.inner.linear(x, weight, activation=activation, residual=residual)
        y = self.inner.linear(x, weight)  # [T, in] -> [T, out]
        return self.inner.add_low_rank(y, x, parts, activation=activation, residual=residual)
