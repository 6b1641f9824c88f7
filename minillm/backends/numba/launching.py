"""Kernels whose work is cut into shares, and how they are launched: one alone, or many as one program.

A kernel of this kind is a function of `(arguments, data, share, shares, worker)`: it does one share of its work, and
any worker may do any share, in any order. Its arguments lie in memory as whole numbers, so a list of launches is data,
and `workers.py` runs a whole forward pass of them in one call.
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
"""So that a worker that is slower than the others takes fewer."""


class Program:
    """Launches in their order, to be run again and again with the same addresses."""

    def __init__(self) -> None:
        self.complete = True
        """All that was asked for while recording is a launch"""
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
        """All launches, one after the other."""
        if len(self._table) < len(self._launches):
            self._table = np.array([launch.row for launch in self._launches], np.int64).reshape(-1, 4)
            self._counters = np.empty((len(self._table), COUNTERS), np.int64)
        run(self._table, self._counters, watched=watched, workers=self.workers)

    def ended(self) -> NDArray[np.int64]:
        """When each launch of the last run ended, if that was watched, by `time.perf_counter_ns`. [n]"""
        return self._counters[:, ENDED].copy()


class _Open(threading.local):
    """The program that records what this thread of Python launches."""

    program: Program | None = None


_open = _Open()


@contextmanager
def recording(program: Program) -> Iterator[None]:
    """Append to `program` what is launched inside the `with` block. It runs all the same."""
    _open.program = program
    try:
        yield
    finally:
        _open.program = None


def recorded_so_far() -> int:
    """How many launches the program has that records; 0 where none does."""
    return 0 if _open.program is None else len(_open.program)


def not_recorded() -> None:
    """Tell that something runs now that is no launch: a program that records is not complete."""
    if _open.program is not None:
        _open.program.complete = False


class _Launch:
    """A kernel with its arguments."""

    def __init__(self, function: int, shares: int, arguments: tuple[Any, ...]) -> None:
        self._kept = arguments  # addresses stay valid
        self._numbers = np.array(as_numbers(arguments), np.int64)
        self.row = (function, address_of(self._numbers), int(self._numbers[0]), shares)


def launch(function: int, data: NDArray[Any] | Rows, *arguments: Any, shares: int = 1) -> None:
    """Run a kernel, and have it recorded where something records.

    Args:
        function: the address of what `shared_kernel` compiled
        data: the array whose type the kernel was compiled for; it is its first argument too
        arguments: arrays, whole numbers and floats; `arguments.py` says how a kernel finds them
        shares: in how many shares; 1 is done by the calling thread alone
    """
    one = _Launch(function, shares, (data, *arguments))
    if _open.program is not None:
        _open.program.add(one)
    workers = num_threads() if shares > 1 else 1
    run(np.array([one.row], np.int64), np.empty((1, COUNTERS), np.int64), watched=False, workers=workers)


def rows_of(x: NDArray[np.float32]) -> Rows:
    """Heads as rows of one piece each; only where they are not are they copied. [T, heads, D] -> [T, heads D]"""
    whole = with_whole_rows(x)
    if whole is not x:
        not_recorded()
    return Rows(whole.reshape(len(x), x.shape[1] * x.shape[2]))


def scratch() -> WorkSpace:
    """Where launches find memory to work in: a program's own while it is recorded, since it may run on any thread."""
    return work if _open.program is None else _open.program.work


def shares_of(pieces: int) -> int:
    """In how many shares a kernel's work is cut that comes in so many pieces."""
    return min(pieces, most_shares())


def most_shares() -> int:
    """In how many shares work is cut at most: some for each worker."""
    return _SHARES_A_WORKER * num_threads()
