"""Finds, compiles and calls the kernels of `kernels/cuda/*.cu`.

Each `.cu` file is one module of `extern "C"` kernels, compiled for one storage type and for the constants that a caller
defines (`HEAD_DIM=64`). A `Launcher` compiles and launches: `cupy.RawModule` on a GPU, g++ and fibers in the tests.
Nothing here imports cupy.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .. import kernel_sources

STORAGE = {"float32": 32, "float16": 16, "bfloat16": 17}
"""dtype of weights, activations and K/V cache -> its number in `common.cuh`."""

NULL = np.uintp(0)
"""Passed to a kernel for an absent array."""


class Kernel(Protocol):
    """One kernel, ready to be launched."""

    max_dynamic_shared_size_bytes: int

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        """Launch. Arrays pass their address; every number is a NumPy scalar of exactly the kernel's type."""


class Module(Protocol):
    """A compiled `.cu` file."""

    def get_function(self, name: str) -> Kernel: ...


class Launcher(Protocol):
    """Compiles source files into modules."""

    def module(self, path: Path, options: tuple[str, ...]) -> Module:
        """Compile `path` with options such as -DNAME=VALUE."""


class Kernels:
    """All kernels for one storage type, compiled when first asked for."""

    def __init__(self, launcher: Launcher, storage: str = "float32", *, debug: bool = False) -> None:
        """`storage` is a key of `STORAGE`, and may be set until a kernel is asked for; `debug` enables index checks on
        the device.
        """
        self.storage = storage
        self._launcher = launcher
        self._debug = ("-DMINILLM_CUDA_DEBUG",) if debug else ()
        self._modules: dict[tuple[str, tuple[str, ...]], Module] = {}
        self._kernels: dict[tuple[Any, ...], Kernel] = {}

    def get(self, module: str, kernel: str, *, shared_mem: int = 0, **constants: int) -> Kernel:
        """A kernel of `kernels/cuda/{module}.cu`, compiled with `constants` as macros.

        `shared_mem` is the most dynamic shared memory it will be launched with; above 48 KiB a kernel must allow it.
        """
        key = (module, kernel, *constants.items())
        if key not in self._kernels:
            defines = tuple(f"-D{name}={value}" for name, value in sorted(constants.items()))
            if (module, defines) not in self._modules:
                storage = f"-DMINILLM_STORAGE={STORAGE[self.storage]}"
                options = (storage, *self._debug, *defines, f"-DMINILLM_SOURCES={sources_digest()}")
                self._modules[module, defines] = self._launcher.module(kernel_folder() / f"{module}.cu", options)
            self._kernels[key] = self._modules[module, defines].get_function(kernel)
        found = self._kernels[key]
        if shared_mem > found.max_dynamic_shared_size_bytes:
            found.max_dynamic_shared_size_bytes = shared_mem
        return found


@cache
def kernel_folder() -> Path:
    """The folder of the sources."""
    return kernel_sources("cuda")


@cache
def sources_digest() -> str:
    """A hash of all sources. CuPy's own cache of compiled kernels does not notice an edited header."""
    digest = hashlib.sha256()
    for path in sorted([*kernel_folder().glob("*.cu"), *kernel_folder().glob("*.cuh")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"0x{digest.hexdigest()[:8]}"


def row_stride(array: Any) -> np.int32:
    """Elements from one row to the next of [T, ...]; each row must be contiguous, as the kernels read it in vectors."""
    size = array.dtype.itemsize
    for n, stride in zip(array.shape[:0:-1], array.strides[:0:-1], strict=True):
        assert n == 1 or stride == size, f"a row of {array.shape} is not contiguous: strides {array.strides}"
        size *= n
    return np.int32(array.strides[0] // array.dtype.itemsize)
