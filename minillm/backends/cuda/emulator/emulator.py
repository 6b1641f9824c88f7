"""The launcher that stands in for CuPy's: the same calls, on NumPy arrays."""

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..kernels import COOPERATIVE_OPTION
from .arguments import address_of, check, is_array, pack, parse_signature
from .building import build_module
from .guarding import Guarded
from .lines import with_lines
from .tensor_map import moved
from .traffic import ACCESS, AccessLog

SCHEDULES = ("forward", "reverse", "random", "warps", "warps-reversed")
"""In which order threads run: by number up or down, at random, or each warp as far as it gets before the next."""

DEFAULT_SHARED = 48 * 1024  # dynamic shared memory that a kernel may have without being told
MOST_SHARED = 227 * 1024  # the most it can be told: sm_90 (99 KiB on sm_120, 163 KiB on sm_80)


class LaunchError(RuntimeError):
    """A launch was refused, or the kernel did what a GPU would not allow; the message names file and line."""


class _Extent(ctypes.Structure):
    """emulation::Extent of include/runtime.h."""

    _fields_ = (("start", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("is_result", ctypes.c_int))


class _Launch(ctypes.Structure):
    """emulation::Launch of include/runtime.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("schedule", ctypes.c_int),
        ("seed", ctypes.c_uint),
        ("watched", ctypes.POINTER(_Extent)),
        ("watched_number", ctypes.c_size_t),
        ("find_races", ctypes.c_int),
        ("dependent", ctypes.c_int),
        ("cooperative", ctypes.c_int),
        ("cluster", ctypes.c_int),
        ("log", ctypes.c_void_p),
        ("log_capacity", ctypes.c_size_t),
        ("logged", ctypes.POINTER(ctypes.c_size_t)),
    )


class Emulator:
    """A `Launcher` (minillm/backends/cuda/kernels.py) that needs no GPU."""

    def __init__(self, schedule: str = "forward", seed: int = 0, *, checks: bool = False) -> None:
        """`schedule` is one of SCHEDULES; `seed` is that of "random".

        With `checks`, several times slower, a launch also ends at the first access outside an argument, at a race
        between threads or blocks, at a load that is not aligned, and at an index outside an array.
        Without, a kernel that writes elsewhere damages this very process: give a new kernel to the checks first.
        """
        self.architecture = "90"
        self.processors = 132
        self.schedule = SCHEDULES.index(schedule)
        self.seed = seed
        self.checks = checks
        self.results: list[tuple[int, int]] | None = None
        """Not None: what follows is launched dependently (kernels/cuda/dependent.cuh), and checked for it. Memory that
        the launches so far may have written, first byte and the one after the last"""

        self.log_capacity = 0
        """With `checks`: how many accesses to arguments the next launches may make, for `accesses` to have them"""
        self.accesses: dict[int, AccessLog] = {}
        """Position of an argument -> what the last launch did there"""

    def module(self, path: Path, options: tuple[str, ...] = ()) -> "EmulatedModule":
        """Compile a `.cu` file with options such as -DNAME=VALUE."""
        return EmulatedModule(self, Path(path), tuple(options))


class EmulatedModule:
    """A compiled `.cu` file."""

    def __init__(self, emulator: Emulator, path: Path, options: tuple[str, ...]) -> None:
        """Compile it, or find it compiled."""
        self.emulator = emulator
        self.cooperative = COOPERATIVE_OPTION in options
        self.cluster = next((int(text.partition("=")[2]) for text in options if text.startswith("-DCLUSTER=")), 0)
        self.path = path
        self.compiled, self.kernels = build_module(path, options, checks=emulator.checks)

    def get_function(self, name: str) -> "EmulatedKernel":
        """The kernel `name`."""
        if name not in self.kernels:
            raise AttributeError(f"{self.path.name} has no kernel {name}; it has {', '.join(self.kernels)}")
        return EmulatedKernel(self, name)


class EmulatedKernel:
    """A kernel, launched as CuPy's RawKernel is."""

    def __init__(self, module: EmulatedModule, name: str) -> None:
        """Read the signature that the C++ compiler saw."""
        self.name = name
        self._emulator = module.emulator
        self._cooperative, self._cluster = module.cooperative, module.cluster
        self._launch = module.compiled[f"emulated_launch_{name}"]
        self._launch.restype = ctypes.c_char_p
        describe = module.compiled[f"emulated_signature_{name}"]
        describe.restype = ctypes.c_char_p
        self.parameters = parse_signature(describe().decode())
        self._shared_limit = DEFAULT_SHARED

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """The most dynamic shared memory that a launch may ask for."""
        return self._shared_limit

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value: int) -> None:
        if value > MOST_SHARED:
            raise LaunchError(f"{self.name}: {value} bytes of shared memory; a block has at most {MOST_SHARED}")
        self._shared_limit = value

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        """Run all blocks. Arrays pass their address; every number is a NumPy scalar of the kernel's type.

        Raises:
            TypeError: an argument does not fit the kernel's signature.
            LaunchError: the launch is impossible, or the kernel did what a GPU would not allow.
        """
        if shared_mem > self._shared_limit:
            raise LaunchError(
                f"{self.name}: {shared_mem} bytes of dynamic shared memory, allowed are {self._shared_limit}: "
                "set max_dynamic_shared_size_bytes first"
            )
        check(self.name, self.parameters, args)
        launch = _Launch(_three(grid), _three(block), shared_mem, self._emulator.schedule, self._emulator.seed)
        launch.cooperative, launch.cluster = self._cooperative, self._cluster
        if self._emulator.checks:
            self._run_checked(launch, args)
        else:
            self._run(launch, *pack(args, address_of))

    def _run(self, launch: _Launch, pointers: Any, _values: Any) -> None:
        error = self._launch(ctypes.byref(launch), pointers)
        if error:
            raise LaunchError(f"{self.name}: {with_lines(error.decode())}")

    def _run_checked(self, launch: _Launch, args: Sequence[Any]) -> None:
        guarded = Guarded(self.parameters, args)
        maps = {i for i, argument in enumerate(args) if isinstance(argument, np.ndarray) and not is_array(argument)}
        args = [moved(argument, guarded.place) if i in maps else argument for i, argument in enumerate(args)]
        launch.watched_number = len(guarded.extents)
        launch.watched = (_Extent * len(guarded.extents))(*(_Extent(e.copy, e.size) for e in guarded.extents))
        launch.find_races = 1
        if (results := self._emulator.results) is not None:
            launch.dependent = bool(results)
            for watched, extent in zip(launch.watched, guarded.extents, strict=False):
                end = extent.start + extent.size
                watched.is_result = any(first < end and extent.start < last for first, last in results)
            results += [(each.start, each.start + each.size) for each in guarded.extents if each.is_written]
        log = np.empty(self._emulator.log_capacity, ACCESS)
        logged = ctypes.c_size_t()
        launch.log, launch.log_capacity, launch.logged = address_of(log), len(log), ctypes.pointer(logged)
        try:
            self._run(launch, *pack(args, guarded.address))
        except LaunchError as error:
            explained = re.sub("<0x([0-9a-f]+)>", lambda match: guarded.explain(int(match[1], 16)), str(error))
            raise LaunchError(explained) from None
        if misuse := guarded.finish():
            raise LaunchError(f"{self.name}: {misuse}")
        if len(log) and logged.value > len(log):
            raise LaunchError(f"{self.name}: {logged.value} accesses to log, expected {len(log)}: raise log_capacity")
        self._emulator.accesses = {
            position: log[: logged.value][log[: logged.value]["extent"] == number]
            for number, extent in enumerate(extent for extent in guarded.extents if extent.size)
            for position, _, _ in extent.arrays
        }


def _three(sizes: tuple[int, ...]) -> Any:
    return (ctypes.c_uint * 3)(*sizes, *(1,) * (3 - len(sizes)))
