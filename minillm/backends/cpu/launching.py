"""Launches kernels of `kernels/cpu`: one alone, or many as one program.

A kernel is a C function of its arguments and of a share of its work (`kernels/cpu/pool.h`). The structures below are
its arguments, field by field as in C: all have 8 bytes. A recorded program is an array of launches in memory, run by
one call without the GIL; where ranks share a pass, functions in Python run between its launches.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compiling import load

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}
_SHARES_A_WORKER = 2
"""More than one, so that a slower worker takes fewer."""


def _structure(name: str, *fields: tuple[str, Any]) -> Any:
    """A structure with these fields: pairs of a type (p: pointer, i: int64, d: double, or a structure) and names."""
    members = [(field, _TYPES.get(names[0], names[0])) for names in fields for field in names[1].split()]
    return type(name, (ctypes.Structure,), {"_fields_": members})


Norm = _structure(
    "Norm", ("p", "x gain bias residual out"), ("i", "T heads width stride gain_stride"), ("d", "epsilon")
)
Glu = _structure("Glu", ("p", "x out"), ("i", "T F activation alone"))
Gate = _structure("Gate", ("p", "x logits out"), ("i", "T F n stride silu"))
Multiply = _structure("Multiply", ("p", "x others factor out"), ("i", "T F stride by_column"))
Table = _structure("Table", ("p", "values scales offsets"), ("i", "format group zeros"))
Embed = _structure(
    "Embed", ("p", "ids"), (Table, "words"), ("p", "positions"), (Table, "places"), ("p", "types"),
    (Table, "kinds"), ("p", "out"), ("i", "T E first stop"), ("d", "scale"),
)  # fmt: skip
Angles = _structure("Angles", ("p", "positions frequencies growth cosines sines"), ("i", "T half rows"), ("d", "scale"))
Heads = _structure("Heads", ("p", "x out"), ("i", "heads D stride out_stride"))
Rotary = _structure("Rotary", (Heads, "q k"), ("p", "cosines sines"), ("i", "T half"))
MoveHeads = _structure("MoveHeads", ("p", "x out"), ("i", "T H width stride head_stride out_stride out_head_stride"))
TakeRows = _structure("TakeRows", ("p", "x rows out"), ("i", "R E"))
AddChanges = _structure("AddChanges", ("p", "y changes residual out"), ("i", "T width activation"))
ScaleLogits = _structure("ScaleLogits", ("p", "logits"), ("i", "count"), ("d", "scale cap"))
Convolve = _structure("Convolve", ("p", "x taps bias states before after out"), ("i", "T C k gated activation stride"))
DeltaRule = _structure(
    "DeltaRule",
    ("p", "x gates decay step_bias states before after out"),
    ("i", "T K V dk dv stride gate_stride"),
)
SelectiveScan = _structure(
    "SelectiveScan",
    ("p", "x steps rates step_bias states before after out"),
    ("i", "T H P G N stride step_stride"),
    ("d", "least most"),
)
StoreKV = _structure(
    "StoreKV",
    ("p", "k v keys values key_scales value_scales slot_pages slot_offsets joined"),
    ("i", "T K P D V k_stride v_stride format"),
)
Attention = _structure(
    "Attention",
    ("p", "q out keys values key_scales value_scales slopes spans tables positions seen scratch parts done"),
    ("i", "N H K P D V stride out_stride table_stride format window causal"),
    ("d", "scale cap"),
    ("p", "bias"),
    ("i", "distances"),
    ("p", "sinks"),
)
Linear = _structure(
    "Linear",
    ("p", "weight scales offsets bias residual x out x_rounded x_scales x_sums scratch"),
    ("i", "rows inputs outputs format group activation zeros wide one_order stride"),
)
LinearParts = _structure("LinearParts", ("p", "parts"), ("i", "count many"))
Route = _structure(
    "Route",
    ("p", "logits bias factors experts weights rows tokens starts"),
    ("i", "T X k normalised sigmoid groups chosen_groups group_best"),
    ("d", "scale"),
)
LinearExperts = _structure(
    "LinearExperts", (Linear, "all"), ("p", "matrices starts biases"), ("i", "X many row_bytes scale_stride sum_stride")
)
Combine = _structure("Combine", ("p", "y weights rows residual out"), ("i", "T E k"))
Argmax = _structure("Argmax", ("p", "logits tokens finite pieces done"), ("i", "R V"))
Sample = _structure("Sample", ("p", "logits draws tokens scratch"), ("i", "R V"))
Uniforms = _structure("Uniforms", ("p", "seeds sequences positions numbers"), ("i", "R purpose"))
TokenLogProbs = _structure("TokenLogProbs", ("p", "logits sums ids scratch"), ("i", "R V n"))
KeepAllowed = _structure("KeepAllowed", ("p", "logits rows masks left"), ("i", "G V W"))
DRAW = np.dtype([(name, np.float64) for name in ("temperature", "top_p", "min_p", "uniform")] + [("top_k", np.int64)])

_LAUNCH = np.dtype(
    {
        "names": ["run", "arguments", "shares", "ended"],
        "formats": [np.uint64, np.uint64, np.int64, np.int64],
        "offsets": [0, 8, 16, 24],
        "itemsize": 192,  # the counters lie in cache lines of their own
    }
)


@cache
def kernels() -> Any:
    """The library of kernels, which is compiled and loaded when it is first needed.

    Raises:
        DeviceError: it cannot be compiled.
    """
    library = load()
    of_one_size = ("attention_scratch", "sample_scratch", "log_probs_scratch", "wide_rows", "sum_parts")
    for name in (*of_one_size, "attention_parts", "linear_scratch"):
        getattr(library, name).restype = ctypes.c_int64
    for name in of_one_size:
        getattr(library, name).argtypes = [ctypes.c_int64]
    library.run_program.argtypes = [ctypes.c_void_p, *3 * [ctypes.c_int64]]
    return library


# --- threads ----------------------------------------------------------------------------------------------------------

_threads = 0


def set_threads(threads: int) -> None:
    """Set the number of threads of all kernels of this process."""
    global _threads
    _threads = threads


def num_threads() -> int:
    """The number of threads that kernels run on: by default the number of cores."""
    if not _threads:
        set_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return _threads


def most_shares() -> int:
    """The number of shares for work of many pieces, or of a number that a replayed program changes: some a worker."""
    return _SHARES_A_WORKER * num_threads()


def shares_of(pieces: int) -> int:
    """The number of shares for work of so many pieces."""
    return max(1, min(pieces, most_shares()))


# --- addresses --------------------------------------------------------------------------------------------------------


def address(array: NDArray[Any]) -> int:
    """The address of an array's first element."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # a third of the time
    except (TypeError, ValueError):  # empty, read-only, or not contiguous
        pointer: int = array.__array_interface__["data"][0]
        return pointer


def filled(structure: Any, **values: Any) -> Any:
    """A structure with these fields; arrays, also of inner ones, give addresses and are kept; None is NULL.

    Its attribute `workers` is how many threads its scratch memory is for, as `Scratch.serve` sets it; None: for any.
    """
    buffers, workers = [], None
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            buffers.append(value)
            values[name] = address(value)
        elif isinstance(value, ctypes.Structure):
            buffers += getattr(value, "kept", ())
            workers = getattr(value, "workers", None) or workers
    arguments = structure(**values)
    arguments.kept, arguments.workers = buffers, workers
    return arguments


def _aligned(count: int) -> NDArray[Any]:
    """Zeroed launches that begin at a cache line."""
    memory = aligned(count * _LAUNCH.itemsize)
    memory[...] = 0
    return memory.view(_LAUNCH)


def aligned(size: int) -> NDArray[np.uint8]:
    """Uninitialised bytes that begin at a cache line, 64 bytes."""
    memory = np.empty(size + 64, np.uint8)
    first = -address(memory) % 64
    return memory[first : first + size]


# --- launches ---------------------------------------------------------------------------------------------------------


class Program:
    """A sequence of launches and functions, run repeatedly with the same addresses."""

    def __init__(self) -> None:
        self.complete = True
        """Whether everything that ran while recording was a launch"""
        self.threads = num_threads()
        self._kept: list[Any] = []
        self._launches: list[tuple[int, int, int, int]] = []
        self._functions: dict[int, Callable[[], object]] = {}
        """By their numbers among the launches, where they have an entry without a kernel"""
        self._array = _aligned(0)
        self._pieces: list[tuple[int, int, int | None]] = []
        """Address and number of launches that follow one another, and the number of the function after them"""

    def __len__(self) -> int:
        return len(self._launches)

    def add(self, kernel: int, arguments: Any, shares: int) -> None:
        """Append a launch. No more threads run the program than its arguments have scratch memory for."""
        self.threads = min(self.threads, arguments.workers or self.threads)
        self._kept.append(arguments)
        self._launches.append((kernel, ctypes.addressof(arguments), shares, 0))

    def add_function(self, function: Callable[[], object]) -> None:
        """Append a function."""
        self._functions[len(self._launches)] = function
        self._launches.append((0, 0, 0, 0))

    def run(self, *, watched: bool = False) -> None:
        """Run everything in order; if `watched`, the end of each launch and function is recorded."""
        if len(self._array) < len(self._launches):
            self._assemble()
        for where, length, function in self._pieces:
            if length:
                _run_at(where, length, self.threads, watched=watched)
            if function is not None:
                self._functions[function]()
                if watched:
                    self._array["ended"][function] = time.perf_counter_ns()

    def _assemble(self) -> None:
        self._array = _aligned(len(self._launches))
        self._array[:] = self._launches
        self._pieces, first = [], 0
        for stop in (*self._functions, len(self._launches)):
            where = address(self._array) + first * _LAUNCH.itemsize
            self._pieces.append((where, stop - first, stop if stop in self._functions else None))
            first = stop + 1

    def ended(self) -> NDArray[np.int64]:
        """End of each launch and function of the last watched run, in ns of `time.perf_counter_ns`. [n]"""
        return self._array["ended"].copy()


class _Launch(ctypes.Structure):
    """The fields of a launch that Python sets."""

    _fields_ = [("run", ctypes.c_void_p), ("arguments", ctypes.c_void_p), ("shares", ctypes.c_int64)]


class _Open(threading.local):
    """A launch of this Python thread's own, and the program that the thread is recording."""

    def __init__(self) -> None:
        self.program: Program | None = None
        self.one = _Launch.from_buffer(aligned(_LAUNCH.itemsize))  # type: ignore[arg-type]
        self.where = ctypes.addressof(self.one)


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
    """Number of launches and functions in the program being recorded; 0 if none is."""
    return 0 if _open.program is None else len(_open.program)


def not_recorded() -> None:
    """Mark the program being recorded as incomplete, since something runs that is not a launch."""
    if _open.program is not None:
        _open.program.complete = False


def launch(kernel: str, arguments: Any, shares: int = 1) -> None:
    """Run a kernel, and record it if a program is being recorded.

    Args:
        kernel: name of the C function
        arguments: its structure, made by `filled`
        shares: number of shares; a single one runs on the calling thread
    """
    if _open.program is not None:
        _open.program.add(_address_of(kernel), arguments, shares)
    launch_on((arguments.workers or num_threads()) if shares > 1 else 1, kernel, arguments, shares)


def launch_on(workers: int, kernel: str, arguments: Any, shares: int) -> None:
    """Run a kernel with at most so many threads, the calling one included."""
    mine = _open
    mine.one.run, mine.one.arguments, mine.one.shares = _address_of(kernel), ctypes.addressof(arguments), shares
    _run_at(mine.where, 1, workers, watched=False)


def call(function: Callable[[], object]) -> None:
    """Call a function, and record it between the launches if a program is being recorded.

    It may read and write the arrays of launches, which have the same addresses each time, and nothing else that changes
    from pass to pass.
    """
    if _open.program is not None:
        _open.program.add_function(function)
    function()


def _run_at(where: int, length: int, threads: int, *, watched: bool) -> None:
    kernels().run_program(where, length, threads, watched)


_addresses: dict[str, int] = {}


def _address_of(kernel: str) -> int:
    if kernel not in _addresses:
        _addresses[kernel] = ctypes.cast(getattr(kernels(), kernel), ctypes.c_void_p).value or 0
    return _addresses[kernel]


class Scratch:
    """Scratch memory by name; it grows as needed, and a name's memory is one launch's at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, count: int, dtype: Any = np.float32) -> NDArray[Any]:
        """An uninitialised array of `count` numbers; after growth earlier launches keep the memory they had."""
        size = count * np.dtype(dtype).itemsize
        if name not in self._buffers or len(self._buffers[name]) < size:
            self._buffers[name] = aligned(-(-size // 64) * 64)
        return self._buffers[name][:size].view(dtype)

    def serve(self, arguments: Any, name: str, size: int, dtype: Any = np.float32) -> None:
        """Set the field `scratch` of a launch's arguments: `size` numbers for each thread that will run it.

        Threads are counted once for both, since another thread may set their number meanwhile.
        """
        arguments.workers = num_threads()
        memory = self.take(name, arguments.workers * size, dtype)
        arguments.scratch = address(memory)
        arguments.kept.append(memory)

    def buffers(self) -> list[NDArray[np.uint8]]:
        """All memory, for arguments that keep it alive."""
        return list(self._buffers.values())
