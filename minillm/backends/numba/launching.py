"""Kernels whose work is cut into shares, and how they are launched: one alone, or many as one program.

A kernel of this kind is a function of `(arguments, data, share, shares, worker)`: it does one share of its work, and
any worker may do any share, in any order. Its arguments lie in memory as whole numbers, so a list of launches is data,
and `_drive` runs a whole forward pass of them in one call: each worker takes the next share that nobody has taken,
and goes on to the next kernel when all shares of this one are done. A program thus ends with however many workers turn
up, and a core that is slower than the others does less.

On two threads of a Zen 5 about 0.1 us pass between two kernels of a program. Leaving one of Numba's own parallel loops
and entering the next took 4.4 us, and the way through Python two more.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numpy.typing import NDArray

from .arguments import Rows, address_of, as_numbers
from .compiling import kernel, num_threads
from .elementary import inner, with_whole_rows
from .intrinsics import INT32, INT64, call, intrinsic
from .workspace import WorkSpace, work

_COUNTERS = 8
"""int64 numbers in a line of memory: the counters of two kernels share none."""
_TAKEN, _DONE, _ENDED = range(3)
"""Which counter is what: shares that were taken, shares that were done, the moment at which all were."""
_SHARES_A_WORKER = 2
"""So that a worker that is slower than the others takes fewer."""
_PATIENCE = 2000
"""How often a worker looks whether the others are done before it offers its core to someone else."""


_CLOCK = {"linux": 1, "darwin": 8}.get(sys.platform)
"""What `time.perf_counter_ns` counts by, as C's clock_gettime knows it: CLOCK_MONOTONIC, CLOCK_UPTIME_RAW."""
TELLS_TIME = _CLOCK is not None
"""Whether a program can note when its kernels ended."""

# --- running a program ------------------------------------------------------------------------------------------------


@intrinsic
def _call_share(
    typing_context: Any, function: Any, arguments: Any, data: Any, share: Any, shares: Any, worker: Any
) -> Any:
    """Call a kernel by its address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [INT64] * 5)  # pointers are passed as numbers of their size are
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _counter(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """A pointer to counters[launch, which]."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, signature.args[0], array, args[1:3])


@intrinsic
def _add_one(typing_context: Any, counters: Any, launch: Any, which: Any) -> Any:
    """counters[launch, which] += 1 as one step of all workers. -> its value before"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _counter(context, builder, signature, args), INT64(1), "seq_cst")

    return types.int64(counters, types.intp, types.intp), generate


@intrinsic
def _value_of(typing_context: Any, counters: Any, launch: Any, which: Any) -> Any:
    """counters[launch, which]; what its writers wrote before is there too."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_counter(context, builder, signature, args), "acquire", 8)

    return types.int64(counters, types.intp, types.intp), generate


@intrinsic
def _wait_a_little(typing_context: Any) -> Any:
    """Leave the core's other thread what it needs, where the processor has an instruction for that."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "x86_64" in builder.module.triple:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _offer_core(typing_context: Any) -> Any:
    """Let another thread run on this core, where the system has a call for that."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if sys.platform != "win32":
            call(builder, "sched_yield", INT32)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _now(typing_context: Any) -> Any:
    """Nanoseconds by the clock of `time.perf_counter_ns`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        time = cgutils.alloca_once(builder, INT64, size=2)  # a timespec
        call(builder, "clock_gettime", INT32, INT32(_CLOCK or 0), time)
        seconds, rest = (builder.load(builder.gep(time, [INT64(i)])) for i in (0, 1))
        return builder.add(builder.mul(seconds, INT64(1_000_000_000)), rest)

    return types.int64(), generate


@inner
def _work(launches: Any, counters: Any, watched: int, worker: int) -> None:
    """What one worker does of a program; the first notes when each launch has ended, where that is asked for."""
    for i in range(len(launches)):
        function, arguments, data, shares = launches[i]
        share = _add_one(counters, i, _TAKEN)
        while share < shares:
            _call_share(function, arguments, data, share, shares, worker)
            _add_one(counters, i, _DONE)
            share = _add_one(counters, i, _TAKEN)
        patience = _PATIENCE
        while _value_of(counters, i, _DONE) < shares:
            patience -= 1
            if patience > 0:
                _wait_a_little()
            else:
                _offer_core()
        if watched and worker == 0:
            counters[i, _ENDED] = _now()


@cache
def _drive(parallel: bool) -> Any:
    """Run launches [n, 4] with counters [n, 8] on so many workers, watched (1) or not (0)."""
    numbers = types.Array(types.int64, 2, "C")
    signature = types.void(numbers, numbers, types.int64, types.int64)
    return kernel(signature, parallel=parallel)(_drive_all if parallel else _drive_alone)


@inner
def _clear(counters: Any) -> None:
    """Nothing is taken or done yet. Within `_drive_all` this would become a parallel loop of its own."""
    counters[:] = 0


def _drive_all(launches: Any, counters: Any, watched: int, workers: int) -> None:
    _clear(counters)
    for worker in prange(workers):
        _work(launches, counters, watched, worker)


def _drive_alone(launches: Any, counters: Any, watched: int, workers: int) -> None:
    _clear(counters)
    _work(launches, counters, watched, 0)


# --- launching --------------------------------------------------------------------------------------------------------


class Program:
    """Launches in their order, to be run again and again with the same addresses."""

    def __init__(self) -> None:
        self.complete = True
        """All that was asked for while recording is a launch"""
        self.workers = num_threads()
        self.work = WorkSpace()
        self._launches: list[_Launch] = []
        self._drive = _drive(self.workers > 1)
        self._table = np.empty((0, 4), np.int64)
        self._counters = np.empty((0, _COUNTERS), np.int64)

    def __len__(self) -> int:
        return len(self._launches)

    def add(self, launch: "_Launch") -> None:
        """Append a launch."""
        self._launches.append(launch)

    def run(self, *, watched: bool = False) -> None:
        """All launches, one after the other."""
        if len(self._table) < len(self._launches):
            self._table = np.array([launch.row for launch in self._launches], np.int64).reshape(-1, 4)
            self._counters = np.empty((len(self._table), _COUNTERS), np.int64)
        self._drive(self._table, self._counters, int(watched), self.workers)

    def ended(self) -> NDArray[np.int64]:
        """When each launch of the last run ended, if that was watched, by `time.perf_counter_ns`. [n]"""
        return self._counters[:, _ENDED].copy()


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
    _drive(workers > 1)(np.array([one.row], np.int64), np.empty((1, _COUNTERS), np.int64), 0, workers)


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
