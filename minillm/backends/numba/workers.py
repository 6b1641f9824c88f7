"""The threads that run a program together: the one that asks for it, and helpers that sleep while there is none.

A program is a list of launches in memory (see `launching.py`). Each worker takes the next share that nobody has taken,
and goes on to the next kernel when all shares of this one are done. So a program ends with however many workers turn
up, and a core that is slower than the others does less.

A helper is a thread of Python's that waits in compiled code, without Python's lock. It spins for the time that lies
between two decode steps, then it sleeps until it is woken. Inside a program workers wait for each other by spinning
for some microseconds and then by short sleeps, so that a core on which other work runs is given up. Where the caller
slept long, other work holds the cores: then programs run on its thread alone for a while, since every kernel would wait
for the worker that is not running.

A forked child has none of its parent's threads: it begins without helpers. While one thread's program runs, those of
other threads run alone.

On two threads of a Zen 5 about 0.1 us pass between two kernels of a program.
"""

import os
import sys
import threading
import time
from functools import cache
from queue import SimpleQueue
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numpy.typing import NDArray

from .arguments import address_of, pointer_to
from .compiling import kernel
from .elementary import inner
from .intrinsics import INT32, INT64, call, intrinsic

COUNTERS = 8
"""int64 numbers in a line of memory: the counters of two kernels share none."""
_TAKEN, _DONE, ENDED = range(3)
"""Which counter is what: shares that were taken, shares that were done, the moment at which all were."""

_TURN, _INSIDE, _ORDER = range(3)
"""The lines of the board. A turn is odd while a program is open to helpers; how many are inside; what to run."""
_TABLE, _LENGTH, _KEPT_COUNTERS, _MOST = range(4)
"""What an order says: addresses of launches and counters, how many launches, how many workers."""

_PATIENCE = 2000
"""How often a worker looks whether the others are done before it sleeps a little: some 30 to 100 us."""
_IDLE = 5 * _PATIENCE
"""How often a helper looks for the next program before it sleeps: some more than pass between two decode steps."""
_NAP = 20_000
"""Nanoseconds of a short sleep; the system adds 50 us of its own."""
_LATE = 10
"""Short sleeps of the caller in one program that show that another worker was kept from its core: about 1 ms."""
_SHORTEST, _LONGEST = 0.02, 0.64
"""Seconds for which programs then run on one thread: twice as long each time, half when all goes well again."""

_CLOCK = {"linux": 1, "darwin": 8}.get(sys.platform)
"""What `time.perf_counter_ns` counts by, as C's clock_gettime knows it: CLOCK_MONOTONIC, CLOCK_UPTIME_RAW."""
TELLS_TIME = _CLOCK is not None
"""Whether a program can note when its kernels ended."""


# --- in kernels -------------------------------------------------------------------------------------------------------


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
    """A pointer to counters[line, which]."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, signature.args[0], array, args[1:3])


@intrinsic
def _add(typing_context: Any, counters: Any, line: Any, which: Any, amount: Any) -> Any:
    """counters[line, which] += amount as one step of all workers. -> its value before"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _counter(context, builder, signature, args), args[3], "seq_cst")

    return types.int64(counters, types.intp, types.intp, types.int64), generate


@intrinsic
def _value_of(typing_context: Any, counters: Any, line: Any, which: Any) -> Any:
    """counters[line, which]; what its writers wrote before is there too."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_counter(context, builder, signature, args), "seq_cst", 8)

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
def _nap(typing_context: Any) -> Any:
    """Give up the core for a short time, where the system has a call for that."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if sys.platform != "win32":
            length = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(INT64, 2), [0, _NAP]))  # a timespec
            call(builder, "nanosleep", INT32, length, ir.Constant(length.type, None))
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
def _wait_for(counters: Any, line: int, which: int, value: int) -> Any:
    """Until a counter has a value. -> how many short sleeps that took"""
    patience, naps = _PATIENCE, 0
    while _value_of(counters, line, which) != value:
        if patience > 0:
            patience -= 1
            _wait_a_little()
        else:
            naps += 1
            _nap()
    return naps


@inner
def _work(launches: Any, counters: Any, watched: int, worker: int) -> Any:
    """What one worker does of a program, which notes when each launch has ended where that is asked for. -> naps"""
    naps = 0
    for i in range(len(launches)):
        function, arguments, data, shares = launches[i]
        share = _add(counters, i, _TAKEN, 1)
        while share < shares:
            _call_share(function, arguments, data, share, shares, worker)
            _add(counters, i, _DONE, 1)
            share = _add(counters, i, _TAKEN, 1)
        naps += _wait_for(counters, i, _DONE, shares)
        if watched:
            counters[i, ENDED] = _now()
    return naps


_NUMBERS = types.Array(types.int64, 2, "C")


@cache
def _alone() -> Any:
    """Run launches [n, 4] with counters [n, 8], watched (1) or not (0), on the calling thread."""
    return kernel(types.void(_NUMBERS, _NUMBERS, types.int64))(_run_alone)


def _run_alone(launches: Any, counters: Any, watched: int) -> None:
    counters[:] = 0
    _work(launches, counters, watched, 0)


@cache
def _together() -> Any:
    """Likewise with so many workers, which find the program on a board. -> naps of the calling thread"""
    return kernel(types.int64(_NUMBERS, _NUMBERS, types.int64, _NUMBERS, types.int64, types.int64, types.int64))(
        _run_together
    )


def _run_together(launches: Any, counters: Any, watched: int, board: Any, table: int, place: int, workers: int) -> Any:
    counters[:] = 0
    board[_ORDER, _TABLE] = table
    board[_ORDER, _LENGTH] = len(launches)
    board[_ORDER, _KEPT_COUNTERS] = place
    board[_ORDER, _MOST] = workers
    _add(board, _TURN, 0, 1)
    naps = _work(launches, counters, watched, 0)
    _add(board, _TURN, 0, 1)  # who comes from now on turns back
    return naps + _wait_for(board, _INSIDE, 0, 0)


@cache
def _help() -> Any:
    """Work on the programs that appear on a board, until none has come for a while. -> the turn that was seen last"""
    return kernel(types.int64(_NUMBERS, types.int64, types.int64))(_help_until_idle)


def _help_until_idle(board: Any, worker: int, seen: int) -> int:
    patience = _IDLE
    while patience > 0:
        turn = _value_of(board, _TURN, 0)
        if turn == seen or turn % 2 == 0:
            patience -= 1
            _wait_a_little()
            continue
        seen, patience = turn, _IDLE
        _add(board, _INSIDE, 0, 1)
        if _value_of(board, _TURN, 0) == turn and worker < board[_ORDER, _MOST]:  # else it may be over by now
            n = board[_ORDER, _LENGTH]
            launches = carray(pointer_to(board[_ORDER, _TABLE], np.int64), (n, 4))
            _work(launches, carray(pointer_to(board[_ORDER, _KEPT_COUNTERS], np.int64), (n, COUNTERS)), 0, worker)
        _add(board, _INSIDE, 0, -1)
    return seen


# --- helpers ----------------------------------------------------------------------------------------------------------


class _Helper:
    """A thread that works on what is on a board."""

    def __init__(self, board: NDArray[np.int64], worker: int) -> None:
        self._board, self._worker = board, worker
        self._asleep, self._bell = False, SimpleQueue[None]()
        threading.Thread(target=self._run, name=f"minillm-{worker}", daemon=True).start()

    def wake(self) -> None:
        """Have it look for programs. Only the thread that holds the team may call this."""
        if self._asleep:
            self._asleep = False
            self._bell.put(None)

    def _run(self) -> None:
        seen, help_out = 0, _help()
        while True:
            seen = help_out(self._board, self._worker, seen)
            self._asleep = True
            if self._board[_TURN, 0] == seen or self._board[_TURN, 0] % 2 == 0:  # else one has come just now
                self._bell.get()


class _Team:
    """The helpers of a process, and whether they are worth waking now."""

    def __init__(self) -> None:
        self._held = threading.Lock()
        """Whose program runs with the helpers"""
        self._board = np.zeros((3, COUNTERS), np.int64)
        self._helpers: list[_Helper] = []
        self._alone_for, self._alone_until = _SHORTEST, 0.0

    def run(self, launches: NDArray[np.int64], counters: NDArray[np.int64], watched: int, workers: int) -> bool:
        """Run a program on several threads. -> False, and nothing is done, where one had better run it alone"""
        if time.monotonic() < self._alone_until or not self._held.acquire(blocking=False):
            return False
        try:
            self._call(min(workers, numba.config.NUMBA_NUM_THREADS) - 1)
            naps = _together()(
                launches, counters, watched, self._board, address_of(launches), address_of(counters), workers
            )
            if naps >= _LATE:
                self._alone_until = time.monotonic() + self._alone_for
                self._alone_for = min(2 * self._alone_for, _LONGEST)
            elif self._alone_for > _SHORTEST:
                self._alone_for /= 2
        finally:
            self._held.release()
        return True

    def _call(self, count: int) -> None:
        """Wake so many helpers; where the system gives no more threads, fewer."""
        try:
            while len(self._helpers) < count:
                self._helpers.append(_Helper(self._board, len(self._helpers) + 1))
        except RuntimeError:
            pass
        for helper in self._helpers[:count]:
            helper.wake()


_team = _Team()


def _forget_helpers() -> None:
    """In a forked child: its parent's threads are not there, nor is who held the team."""
    global _team
    _team = _Team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)


def run(launches: NDArray[np.int64], counters: NDArray[np.int64], *, watched: bool, workers: int) -> None:
    """Run launches, one after the other: rows [n, 4] of a kernel's address, those of its arguments and data, shares.

    Args:
        launches: what to run
        counters: [n, COUNTERS]; what they hold does not matter
        watched: whether counters[:, ENDED] tell afterwards when each launch ended, by `time.perf_counter_ns`
        workers: on how many threads at most
    """
    if workers == 1 or not _team.run(launches, counters, int(watched), workers):
        _alone()(launches, counters, int(watched))
