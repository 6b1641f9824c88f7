"""The thread pool that runs programs: the calling thread, and helpers that sleep while there is no program.

A program is a list of launches in memory (see `launching.py`). Each worker takes the next free share, and goes on to
the next kernel when all shares of this one are done. So a program completes with any number of workers, and a slower
core does less.

A helper is a Python thread that waits in compiled code, without the GIL. It spins for about the time between two decode
steps, then sleeps until it is woken. Inside a program workers wait for each other by spinning for some microseconds and
then by short sleeps, which yield the core to other processes. If the caller slept long, other processes hold the cores:
programs then run on its thread alone for a while, since every kernel would wait for a worker that is not scheduled.

A forked child has none of its parent's threads: it begins without helpers. While one thread's program uses the helpers,
other threads run theirs alone.
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
"""int64 numbers in a cache line: the counters of two kernels share none."""
_TAKEN, _DONE, ENDED = range(3)
"""The counters of a launch: shares taken, shares done, and its end time."""

_TURN, _INSIDE, _ORDER = range(3)
"""The lines of the board: a turn, odd while a program is open to helpers; the number of helpers inside; the order."""
_TABLE, _LENGTH, _KEPT_COUNTERS, _MOST = range(4)
"""The fields of an order: address and number of launches, address of counters, number of workers."""

_PATIENCE = 2000
"""Polls of a worker before it begins to sleep while it waits for the others: some 30 to 100 us."""
_IDLE = 5 * _PATIENCE
"""Polls of a helper for the next program before it sleeps: longer than the time between two decode steps."""
_NAP = 20_000
"""Nanoseconds of a short sleep; the system adds about 50 us."""
_LATE = 10
"""Short sleeps of the caller in one program that show a worker without a core: about 1 ms."""
_SHORTEST, _LONGEST = 0.02, 0.64
"""Seconds for which programs then run on one thread: doubled each time, halved after each undisturbed program."""

_CLOCK = {"linux": 1, "darwin": 8}.get(sys.platform)
"""The clock of `time.perf_counter_ns` in C's clock_gettime: CLOCK_MONOTONIC, CLOCK_UPTIME_RAW."""
TELLS_TIME = _CLOCK is not None
"""Whether a program can record when its kernels ended."""


# --- in kernels -------------------------------------------------------------------------------------------------------


@intrinsic
def _call_share(
    typing_context: Any, function: Any, arguments: Any, data: Any, share: Any, shares: Any, worker: Any
) -> Any:
    """Call a kernel by its address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [INT64] * 5)  # pointers are passed like integers of their size
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _counter(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """A pointer to counters[line, which]."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, signature.args[0], array, args[1:3])


@intrinsic
def _add(typing_context: Any, counters: Any, line: Any, which: Any, amount: Any) -> Any:
    """Atomic counters[line, which] += amount. -> its value before"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _counter(context, builder, signature, args), args[3], "seq_cst")

    return types.int64(counters, types.intp, types.intp, types.int64), generate


@intrinsic
def _value_of(typing_context: Any, counters: Any, line: Any, which: Any) -> Any:
    """Atomic read of counters[line, which]; earlier writes of its writers are visible after it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_counter(context, builder, signature, args), "seq_cst", 8)

    return types.int64(counters, types.intp, types.intp), generate


@intrinsic
def _wait_a_little(typing_context: Any) -> Any:
    """Yield to the core's other hardware thread, if the processor has an instruction for that."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "x86_64" in builder.module.triple:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _nap(typing_context: Any) -> Any:
    """Sleep for `_NAP` ns, if the system has a call for that."""

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
    """Wait until a counter has a value. -> number of short sleeps"""
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
    """Do one worker's part of a program; if `watched`, record the end of each launch. -> number of short sleeps"""
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
    """Likewise with several workers, which find the program on a board. -> short sleeps of the calling thread"""
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
    _add(board, _TURN, 0, 1)  # closes the program to further helpers
    return naps + _wait_for(board, _INSIDE, 0, 0)


@cache
def _help() -> Any:
    """Work on the programs posted on a board, until none has come for a while. -> the last turn seen"""
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
    """A thread that works on the programs posted on a board."""

    def __init__(self, board: NDArray[np.int64], worker: int) -> None:
        self._board, self._worker = board, worker
        self._asleep, self._bell = False, SimpleQueue[None]()
        threading.Thread(target=self._run, name=f"minillm-{worker}", daemon=True).start()

    def wake(self) -> None:
        """Wake the thread if it sleeps. Only the thread that holds the team's lock may call this."""
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
    """The helpers of a process, and the time for which they are not used."""

    def __init__(self) -> None:
        self._held = threading.Lock()
        """Held by the thread whose program runs with the helpers"""
        self._board = np.zeros((3, COUNTERS), np.int64)
        self._helpers: list[_Helper] = []
        self._alone_for, self._alone_until = _SHORTEST, 0.0

    def run(self, launches: NDArray[np.int64], counters: NDArray[np.int64], watched: int, workers: int) -> bool:
        """Run a program on several threads. -> False, having done nothing, if it should run on one"""
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
        """Wake `count` helpers; fewer if the system refuses threads."""
        try:
            while len(self._helpers) < count:
                self._helpers.append(_Helper(self._board, len(self._helpers) + 1))
        except RuntimeError:
            pass
        for helper in self._helpers[:count]:
            helper.wake()


_team = _Team()


def _forget_helpers() -> None:
    """Reset the team in a forked child, which has neither its parent's threads nor the holder of the lock."""
    global _team
    _team = _Team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)


def run(launches: NDArray[np.int64], counters: NDArray[np.int64], *, watched: bool, workers: int) -> None:
    """Run launches in order.

    Args:
        launches: rows [n, 4]: addresses of a kernel, of its arguments and of its data; number of shares
        counters: [n, COUNTERS], overwritten
        watched: record the end of each launch in counters[:, ENDED], in ns of `time.perf_counter_ns`
        workers: the most threads
    """
    if workers == 1 or not _team.run(launches, counters, int(watched), workers):
        _alone()(launches, counters, int(watched))
