"""Launches kernels whose work is split into shares: one alone, or many as one program.

Such a kernel is a function of `(arguments, data, share, shares, worker)` that does one share of its work; any worker
may do any share, in any order. Its arguments are stored in memory as integers, so a list of launches is data, and
`workers.py` runs a whole forward pass of them in one call.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arguments import Rows, address_of, as_numbers
from .compiling import num_threads
from .elementary import with_whole_rows
from .workers import COUNTERS, ENDED, run
from .workspace import WorkSpace, work

_SHARES_A_WORKER = 2
"""More than one, so that a slower worker takes fewer."""


class Program:
    """A sequence of launches, to be run repeatedly with the same addresses."""

    def __init__(self) -> None:
        self.complete = True
        """Whether everything that ran while recording was a launch"""
        self.workers = num_threads()
        self.work = WorkSpace()
        self._launches: list[_Launch] = []
        self._table = np.empty((0, 4), np.int64)
        self._counters = np.empty((0, COUNTERS), np.int64)

    def __len__(self) -> int:
        return len(self._launches)

    def add(self, launch: "_Launch") -> None:
        """Append a launch."""
        self._launches.append(launch)

    def run(self, *, watched: bool = False) -> None:
        """Run all launches in order."""
        if len(self._table) < len(self._launches):
            self._table = np.array([launch.row for launch in self._launches], np.int64).reshape(-1, 4)
            self._counters = np.empty((len(self._table), COUNTERS), np.int64)
        run(self._table, self._counters, watched=watched, workers=self.workers)

    def ended(self) -> NDArray[np.int64]:
        """End time of each launch of the last run, if that was watched, in ns of `time.perf_counter_ns`. [n]"""
        return self._counters[:, ENDED].copy()


class _Open(threading.local):
    """The program that this Python thread is recording."""

    program: Program | None = None


_open = _Open()


@contextmanager
def recording(program: Program) -> Iterator[None]:
    """Record the launches made inside the `with` block in `program`. They also run."""
    _open.program = program
    try:
        yield
    finally:
        _open.program = None


def recorded_so_far() -> int:
    """Number of launches in the program being recorded; 0 if none is."""
    return 0 if _open.program is None else len(_open.program)


def not_recorded() -> None:
    """Mark the program being recorded as incomplete, since something runs that is not a launch."""
    if _open.program is not None:
        _open.program.complete = False


class _Launch:
    """A kernel with its arguments."""

    def __init__(self, function: int, shares: int, arguments: tuple[Any, ...]) -> None:
        self._kept = arguments  # keeps the addresses valid
        self._numbers = np.array(as_numbers(arguments), np.int64)
        self.row = (function, address_of(self._numbers), int(self._numbers[0]), shares)


def launch(function: int, data: NDArray[Any] | Rows, *arguments: Any, shares: int = 1) -> None:
    """Run a kernel, and record it if a program is being recorded.

    Args:
        function: address of a kernel compiled by `shared_kernel`
        data: the array whose type the kernel was compiled for; also its first argument
        arguments: arrays, integers and floats, encoded by `arguments.py`
        shares: number of shares; a single one runs on the calling thread
    """
    one = _Launch(function, shares, (data, *arguments))
    if _open.program is not None:
        _open.program.add(one)
    workers = num_threads() if shares > 1 else 1
    run(np.array([one.row], np.int64), np.empty((1, COUNTERS), np.int64), watched=False, workers=workers)


def rows_of(x: NDArray[np.float32]) -> Rows:
    """Flatten heads into contiguous rows; copies only where they are not. [T, heads, D] -> [T, heads D]"""
    whole = with_whole_rows(x)
    if whole is not x:
        not_recorded()
    return Rows(whole.reshape(len(x), x.shape[1] * x.shape[2]))


def scratch() -> WorkSpace:
    """Scratch memory for launches: a program's own while it is recorded, since it may run on any thread."""
    return work if _open.program is None else _open.program.work


def shares_of(pieces: int) -> int:
    """Number of shares for a kernel whose work has so many pieces."""
    return min(pieces, most_shares())


def most_shares() -> int:
    """The most shares that work is split into: some for each worker."""
    return _SHARES_A_WORKER * num_threads()
