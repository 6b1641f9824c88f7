"""NumPy's BLAS beside other work: one thread for it while its threads are kept from their cores.

A product that BLAS shares out ends with its slowest thread, and the others spin meanwhile. Where other work runs on the
cores, each product so waits for a thread that is not running: beside two busy processes on two cores a prefill on two
threads took eight times as long as on one. Such a product shows in the caller: more time has passed than its thread
has been given of a processor. The products after it, for some time, run on one thread.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_LOST = 1e-3
"""Seconds without a processor in one product that show other work: a system takes a core away for 1 to 4 ms."""
_SHORTEST, _LONGEST = 0.1, 3.2
"""Seconds on one thread: twice as long each time, as at first when twice as long has passed without a loss."""


@cache
def _libraries() -> list[Any]:
    """The BLAS libraries of this process."""
    from threadpoolctl import ThreadpoolController

    return list(ThreadpoolController().select(user_api="blas").lib_controllers)


class BlasLimit:
    """One thread for BLAS, in all of this process, while anybody asks for it."""

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
        """End what `ask` began; the last one has BLAS use as many threads as before."""
        with self._lock:
            self._asked -= 1
            if not self._asked:
                for library, threads in zip(_libraries(), self._before, strict=True):
                    library.set_num_threads(threads)


LIMIT = BlasLimit()


class Watch:
    """Sees whether the products of a backend lose time to other work, and limits BLAS then."""

    def __init__(self, limit: BlasLimit = LIMIT) -> None:
        self._limit, self._inside, self._limited = limit, False, False
        self._pause, self._until = 0.0, 0.0

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """BLAS is limited within a pass only: what else uses it in this process keeps its threads."""
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

    @contextmanager
    def product(self) -> Iterator[None]:
        """Watch one product."""
        if self._limited or not self._inside or sys.platform == "win32":  # whose clock of a thread ticks every 16 ms
            yield
            return
        began, worked = time.perf_counter(), time.thread_time()
        yield
        if time.perf_counter() - began - (time.thread_time() - worked) > _LOST:
            now = time.monotonic()
            recently = now < self._until + 2 * self._pause
            self._pause = min(2 * self._pause, _LONGEST) if recently and self._pause else _SHORTEST
            self._until = now + self._pause
            self._begin()

    def _begin(self) -> None:
        self._limit.ask()
        self._limited = True
