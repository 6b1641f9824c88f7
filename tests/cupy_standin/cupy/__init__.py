"""A stand-in for CuPy where there is no GPU: the names that minillm uses, on NumPy arrays and the emulator.

With this folder first on the path `import cupy` finds it, and what is written for a GPU runs unchanged: streams,
events, captured graphs, pinned memory, `RawModule`. So a benchmark that gets one call on a real GPU is run here before.

It is as strict as CuPy where that has cost people time: no library call and no new array's memory inside a capture, and
arguments of exactly a kernel's types. It says nothing about speed.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from minillm.backends.cuda import library, tensor_maps
from minillm.backends.cuda.emulator import BuildError, Emulator
from minillm.backends.cuda.emulator.tensor_map import encode

from . import cuda
from .memory import MemoryPool, Pointer, ndarray

__version__ = "stand-in"
if __name__ == "cupy":  # a benchmark's process, in which all of CUDA is a stand-in
    library.load = lambda version: cuda.cublas.OwnLibrary()
_POOL = MemoryPool()


def __getattr__(name: str) -> Any:
    """NumPy's types, and its functions with results on the device."""
    found = getattr(np, name)
    if not callable(found) or isinstance(found, type):
        return found

    def on_device(*arguments: Any, **options: Any) -> Any:
        result = found(*arguments, **options)
        return result.view(ndarray) if isinstance(result, np.ndarray) else result

    return on_device


def empty(shape: Any, dtype: Any = float) -> ndarray:
    """Uninitialised memory of the device, which is NaN where it can be."""
    cuda.refuse_in_capture("a new array")
    array = np.empty(shape, dtype).view(ndarray)
    if array.size:
        array.reshape(-1).view(np.uint8)[...] = 0xFF
    return array


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    """Zeros on the device."""
    array = empty(shape, dtype)
    array[...] = 0
    return array


def asarray(values: Any, dtype: Any = None) -> ndarray:
    """A copy on the device, if it is not there."""
    return values if isinstance(values, ndarray) and dtype is None else np.array(values, dtype).view(ndarray)


def asnumpy(array: Any) -> Any:
    """A copy on the host."""
    cuda.refuse_in_capture("a copy to the host")
    return np.array(array)


def matmul(a: Any, b: Any, out: Any = None) -> Any:
    """The library's product."""
    cuda.refuse_in_capture("a library call")
    return np.matmul(a.astype(np.float32), b.astype(np.float32), out=out, casting="unsafe")


def get_default_memory_pool() -> MemoryPool:
    """The pool of the device's memory."""
    return _POOL


tensor_maps.encode = encode  # in the driver's place


class RawModule:
    """A module of kernels, run by the emulator."""

    def __init__(self, code: str, options: tuple[str, ...] = ()) -> None:
        """The source's name is in its first line, and its folder among the options."""
        name = re.match(r'#line 1 "([^"]+)"', code)
        (folder,) = (option[2:] for option in options if option.startswith("-I"))
        assert name is not None
        defines = tuple(option for option in options if not option.startswith(("-I", "--std", "-lineinfo")))
        self._path, self._options = Path(folder) / name[1], defines

    def get_function(self, name: str) -> "RawKernel":
        """The kernel `name`; the module is compiled now."""
        cuda.refuse_in_capture("to load a module")
        try:
            return RawKernel(Emulator().module(self._path, self._options).get_function(name))
        except BuildError as error:
            raise cuda.compiler.CompileException(str(error)) from None


class RawKernel:
    """A kernel, which a capture records in place of running it."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """The most dynamic shared memory that a launch may ask for."""
        return self._kernel.max_dynamic_shared_size_bytes

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value: int) -> None:
        self._kernel.max_dynamic_shared_size_bytes = value

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        """Run all blocks, or record that. Grid and block are tuples and of no other class, as CuPy demands."""
        assert type(grid) is tuple, grid
        assert type(block) is tuple, block
        cuda.launch(lambda: self._kernel(grid, block, args, shared_mem=shared_mem))


__all__ = ["Pointer", "RawKernel", "RawModule", "asarray", "asnumpy", "cuda", "empty", "matmul", "ndarray", "zeros"]
