"""The NumPy backend: runs the reference implementation of every operation, and works everywhere."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from ..batch import Batch
from ..reference.sampling import Draw
from .base import QUANTIZED, Backend, Result
from .blas import Watch
from .weights import Weight


class NumpyBackend(Backend):
    """Runs on a CPU through NumPy and its BLAS."""

    name = "numpy"
    kept = QUANTIZED
    """NumPy computes in float32, so 16-bit weights are expanded once, at load. 8- and 4-bit weights are expanded at
    each product instead: a quantised checkpoint is meant to stay small."""

    def __init__(self, xp: Any = np, *, weights: str = "float32", weight_order: Literal["C", "F"] = "C") -> None:
        """As `Backend`."""
        super().__init__(xp, weights=weights, weight_order=weight_order)
        self._watch = Watch()

    def run(
        self,
        owner: object,
        batch: Batch,
        rows: Any,
        compute: Callable[[Batch, Any], Result],
        draws: Sequence[Draw | None] = (),
    ) -> Result:
        """Run a forward pass, on one thread while other processes use the cores."""
        with self._watch.forward_pass():
            return super().run(owner, batch, rows, compute, draws)

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """activation(x W^T + b) + residual. [T, in] -> [T, out]"""
        with self._watch.product():
            return super().linear(x, weight, activation=activation, residual=residual)
