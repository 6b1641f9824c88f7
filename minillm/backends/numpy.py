"""The NumPy backend: runs the reference implementation of every operation, and works everywhere.

Its BLAS is limited to one thread while other processes keep the threads from their cores. A product on several threads
ends with the slowest one, and the others spin meanwhile. When other processes use the cores, each product waits for a
thread that is not scheduled: with two busy processes on two cores, a prefill on two threads took eight times as long as
on one. The calling thread detects this: more wall-clock time has passed than it had CPU time. Products then run on one
thread for some time.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

from ..batch import Batch
from ..reference.experts import Routing
from ..reference.sampling import Draw
from .formats import BLOCKS, Format, WeightFormats
from .loader import INTEGERS, Loader
from .memory import Memory
from .operations import Backend
from .recording import Result
from .weights import Weight

LOST = 1e-3
"""Seconds off the CPU in one product that indicate contention: a scheduler takes a core away for 1 to 4 ms"""
_SHORTEST, _LONGEST = 0.1, 3.2
"""Seconds on one thread: doubled at each loss, reset when twice as long has passed without one."""


@cache
def _libraries() -> list[Any]:
    """The BLAS libraries of this process."""
    from threadpoolctl import ThreadpoolController

    return list(ThreadpoolController().select(user_api="blas").lib_controllers)


class BlasLimit:
    """Limits BLAS to one thread, process-wide, while any caller asks for it."""

    def __init__(self) -> None:
        self._lock, self._asked, self._before = threading.Lock(), 0, list[int]()

    def ask(self) -> None:
        """Limit BLAS to one thread until `release`."""
        with self._lock:
            self._asked += 1
            if self._asked == 1:
                self._before = [library.get_num_threads() for library in _libraries()]
                for library in _libraries():
                    library.set_num_threads(1)

    def release(self) -> None:
        """Undo one `ask`; the last one restores the number of threads."""
        with self._lock:
            self._asked -= 1
            if not self._asked:
                for library, threads in zip(_libraries(), self._before, strict=True):
                    library.set_num_threads(threads)


LIMIT = BlasLimit()


class Watch:
    """Limits BLAS once products have lost time to other processes."""

    def __init__(self, limit: BlasLimit = LIMIT) -> None:
        self._limit, self._inside, self._limited = limit, False, False
        self._pause, self._until = 0.0, 0.0

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Limit BLAS within a pass only: other users of BLAS in this process keep its threads."""
        self._inside = True
        if time.monotonic() < self._until:
            self._begin()
        try:
            yield
        finally:
            self._inside = False
            if self._limited:
                self._limited = False
                self._limit.release()

    def product_lost_time(self) -> None:
        """Limit BLAS for the rest of the pass, and for the passes of some time: a product has lost more than `LOST`."""
        if self._limited or not self._inside or sys.platform == "win32":  # its thread clock ticks every 16 ms
            return
        now = time.monotonic()
        recently = now < self._until + 2 * self._pause
        self._pause = min(2 * self._pause, _LONGEST) if recently and self._pause else _SHORTEST
        self._until = now + self._pause
        self._begin()

    def _begin(self) -> None:
        self._limit.ask()
        self._limited = True


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
