"""The NumPy backend: runs the reference implementation of every operation, and works everywhere."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..batch import Batch
from ..reference.experts import Routing
from ..reference.sampling import Draw
from .blas import LOST, Watch
from .formats import BLOCKS, Format, WeightFormats
from .loader import INTEGERS, Loader
from .memory import Memory
from .operations import Backend
from .recording import Result
from .weights import Weight


class NumpyBackend(Backend):
    """Runs on a CPU through NumPy and its BLAS."""

    name = "numpy"

    def __init__(
        self,
        *,
        weights: str | WeightFormats = "float32",
        activations: str | Format = "float32",
        cache: str | Format = "float32",
        weight_order: Literal["C", "F"] = "C",
    ) -> None:
        """Set the formats, or their names in `formats.py`, and the order of float32 weights (see `Loader`).

        NumPy computes in float32, so "auto" expands 16-bit weights once, at load. 8- and 4-bit weights and blocks are
        expanded at each product instead: a quantised checkpoint is meant to stay small.
        """
        self._watch = Watch()
        super().__init__(
            Loader(weights, kept={*INTEGERS, *BLOCKS.values()}, order=weight_order),
            NumpyMemory(self._watch, activations=activations, cache=cache),
        )

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """activation(x W^T + b) + residual. [T, in] -> [T, out]"""
        began, worked = time.perf_counter(), time.thread_time()
        out = super().linear(x, weight, activation=activation, residual=residual)
        if time.perf_counter() - began - (time.thread_time() - worked) > LOST:
            self._watch.product_lost_time()
        return out

    def linear_experts(self, x: Any, weight: Weight, routing: Routing) -> Any:
        """Each row's product with its expert's matrix. [T k, in] -> [T k, out]"""
        began, worked = time.perf_counter(), time.thread_time()
        out = super().linear_experts(x, weight, routing)
        if time.perf_counter() - began - (time.thread_time() - worked) > LOST:
            self._watch.product_lost_time()
        return out


class NumpyMemory(Memory):
    """The host's memory."""

    def __init__(self, watch: Watch, **formats: str | Format) -> None:
        super().__init__(**formats)
        self._watch = watch

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
