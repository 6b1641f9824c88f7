"""The launchers of kernels in tests: the emulator, or a real GPU with MINILLM_TEST_GPU=1 in the environment.

    MINILLM_TEST_GPU=1 python -m pytest tests/backends/cuda

Tests hand NumPy arrays to kernels. On a GPU each launch gets copies of the memory that they lie in, and what it wrote
comes back; so the same tests serve both.
"""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds

from minillm.backends.cuda import emulator, tensor_maps
from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.emulator.arguments import is_array
from minillm.backends.cuda.emulator.tensor_map import decode
from minillm.backends.cuda.kernels import Kernel, Launcher, Module

ON_GPU = os.environ.get("MINILLM_TEST_GPU", "") in ("1", "unpooled")
UNPOOLED = os.environ.get("MINILLM_TEST_GPU") == "unpooled"
"""Each array has memory of its own from the driver: in a pool's, compute-sanitizer does not see where it ends."""


def exhaustive(*values: object) -> Any:
    """A case in which a test shows what it shows with others."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def missing() -> str | None:
    """The lack of something, as a reason to skip. On a GPU nothing is skipped for its lack."""
    return None if ON_GPU else emulator.missing()


def launcher(schedule: str = "forward") -> Launcher:
    """A launcher, which compiles too; a GPU has its own order of threads."""
    return GpuLauncher() if ON_GPU else Emulator(schedule)


class GpuLauncher:
    """The GPU, for kernels that are given NumPy arrays."""

    def __init__(self) -> None:
        from minillm.backends.cuda.compiling import CupyLauncher

        self._inner = CupyLauncher()
        self.architecture, self.processors = self._inner.architecture, self._inner.processors
        if UNPOOLED:
            import cupy

            cupy.cuda.set_allocator(None)

    def module(self, path: Path, options: tuple[str, ...] = ()) -> Module:
        return _Module(self._inner.module(path, options))


class _Module:
    def __init__(self, inner: Module) -> None:
        self._inner = inner

    def get_function(self, name: str) -> Kernel:
        return _Kernel(self._inner.get_function(name))


class _Kernel:
    def __init__(self, inner: Kernel) -> None:
        self._inner = inner

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._inner.max_dynamic_shared_size_bytes

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value: int) -> None:
        self._inner.max_dynamic_shared_size_bytes = value

    def __call__(self, grid: Any, block: Any, args: Sequence[Any], *, shared_mem: int = 0) -> None:
        extents = _extents([argument for argument in args if is_array(argument)])
        there = [_on_device(argument, extents) if isinstance(argument, np.ndarray) else argument for argument in args]
        self._inner(grid, block, there, shared_mem=shared_mem)
        for extent in extents:
            extent.fetch()


class _Extent:
    """Memory that one array lies in, or several that overlap, and its copy on the device."""

    def __init__(self, start: int, end: int, *, written: bool) -> None:
        import cupy

        self.start, self.size, self.written = start, end - start, written
        self._before = start % 16  # kernels choose the width of their loads by an array's address
        self.copy = cupy.empty(max(1, self._before + self.size), np.uint8)
        self.copy[self._before : self._before + self.size].set(self._host())

    def pointer(self, address: int) -> Any:
        """The place on the device of the byte at `address`."""
        return self.copy.data + (self._before + address - self.start)

    def fetch(self) -> None:
        """Copy it back."""
        if self.written and self.size:
            self._host()[...] = self.copy[self._before : self._before + self.size].get()

    def _host(self) -> np.ndarray:
        return np.frombuffer((ctypes.c_ubyte * self.size).from_address(self.start), np.uint8)


def _extents(arrays: list[np.ndarray]) -> list[_Extent]:
    """Copies of the memory that some arrays lie in."""
    groups: list[list[Any]] = []
    for start, end, writeable in sorted((*_bounds(array), array.flags.writeable) for array in arrays):
        if groups and start < groups[-1][1]:
            groups[-1][1] = max(groups[-1][1], end)
            groups[-1][2] |= writeable
        else:
            groups.append([start, end, writeable])
    return [_Extent(start, end, written=written) for start, end, written in groups]


def _on_device(array: np.ndarray, extents: list[_Extent]) -> Any:
    import cupy

    if not is_array(array):  # a tensor map
        tensor = decode(array)
        extent = next(e for e in extents if e.start <= tensor.address < e.start + e.size)
        return tensor_maps.encode(tensor._replace(address=int(extent.pointer(tensor.address).ptr)))
    start, end = _bounds(array)
    extent = next(e for e in extents if e.start <= start and end <= e.start + e.size)
    return cupy.ndarray(array.shape, array.dtype, extent.pointer(start), array.strides)


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """The first byte, and the one after the last. Strides are not negative in these tests."""
    address = int(array.__array_interface__["data"][0])
    return byte_bounds(array) if array.size else (address, address)
