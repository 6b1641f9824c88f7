"""Finds, compiles and calls the kernels of `kernels/cuda/*.cu`.

Each `.cu` file is one module of `extern "C"` kernels, compiled for one storage type and for the constants that a caller
defines (`HEAD_DIM=64`). A `Launcher` compiles and launches: `cupy.RawModule` on a GPU, g++ and fibers in the tests.
Nothing here imports cupy.
"""

import hashlib
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import compiling, kernel_sources

STORAGE = {"float32": 32, "float16": 16, "bfloat16": 17}
"""dtype of weights, activations and K/V cache -> its number in `common.cuh`."""

ARCHITECTURES = dict.fromkeys(("gemm_wgmma", "gemm_wgmma_integers", "gemm_tma", "attention_wgmma"), "90a")
"""Modules with instructions of one architecture only, which has no successor that runs them."""

COOPERATIVE_KERNELS = frozenset({"step"})
"""Modules of one kernel of that name, whose blocks wait for each other: they must all be on the device at once"""
COOPERATIVE_OPTION = "-DCOOPERATIVE=1"
"""Tells the launcher of such a module"""

NULL = np.uintp(0)
"""Passed to a kernel for an absent array."""


class Kernel(Protocol):
    """One kernel, ready to be launched."""

    max_dynamic_shared_size_bytes: int

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        """Launch. Arrays pass their address; every number is a NumPy scalar of exactly the kernel's type."""


class Module(Protocol):
    """A compiled `.cu` file."""

    def get_function(self, name: str) -> Kernel: ...


class Launcher(Protocol):
    """Compiles source files into modules."""

    architecture: str
    """Compute capability of the device, such as "90" """
    processors: int
    """Its multiprocessors: a launch should make about as many blocks, or more"""

    def module(self, path: Path, options: tuple[str, ...]) -> Module:
        """Compile `path` with options such as -DNAME=VALUE."""


class Launch(NamedTuple):
    """One call of a kernel."""

    name: str
    constants: dict[str, int]
    kernel: Kernel
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]
    """In the kernel's order; a NamedTuple if `fusing.py` reads them"""
    shared_mem: int

    def __call__(self) -> None:
        """Launch it."""
        self.kernel(self.grid, self.block, self.args, shared_mem=self.shared_mem)


class _Collecting:
    """A kernel whose calls are noted."""

    def __init__(self, launches: list[Launch], name: str, constants: dict[str, int], kernel: Kernel) -> None:
        self._note = launches.append
        self._what = name, constants, kernel
        self.max_dynamic_shared_size_bytes = kernel.max_dynamic_shared_size_bytes

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        self._note(Launch(*self._what, grid, block, args, shared_mem))


ALL_REDUCE = "all_reduce"
"""Name of the sum over ranks among a recorded step's launches"""


class Call:
    """A function of the host, such as a library's product, in the place of a kernel: it launches by itself."""

    max_dynamic_shared_size_bytes = 0

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        """Call it."""
        self._function(*args)


class Kernels:
    """All kernels for one storage type, compiled when first asked for."""

    def __init__(
        self, launcher: Launcher, storage: str = "float32", *, debug: bool = False, dependent: bool = False
    ) -> None:
        """`storage` is a key of `STORAGE`, and may be set until a kernel is asked for; `debug` enables index checks on
        the device; `dependent` kernels may be launched before those before them have ended (`dependent.py`).
        """
        self.storage = storage
        self.dependent = dependent
        self._launcher = launcher
        switches = {"-DMINILLM_CUDA_DEBUG": debug, "-DDEPENDENT=1": dependent}
        self._switches = tuple(switch for switch, on in switches.items() if on)
        self._modules: dict[tuple[str, tuple[str, ...]], Module] = {}
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._collected: list[Launch] | None = None

    @property
    def architecture(self) -> int:
        """Compute capability of the device, such as 90."""
        return int(self._launcher.architecture)

    @property
    def processors(self) -> int:
        """Multiprocessors of the device."""
        return self._launcher.processors

    def has(self, module: str) -> bool:
        """Whether the device runs a module: all but those of another architecture."""
        return ARCHITECTURES.get(module, self._launcher.architecture).removesuffix("a") == self._launcher.architecture

    def get(self, module: str, kernel: str, *, shared_mem: int = 0, **constants: int) -> Kernel:
        """A kernel of `kernels/cuda/{module}.cu`, compiled with `constants` as macros.

        `shared_mem` is the most dynamic shared memory it will be launched with.
        """
        key = (module, kernel, shared_mem, *constants.items())
        function = self._kernels.get(key)
        if function is None:
            defines = tuple(f"-D{name}={value}" for name, value in sorted(constants.items()))
            with compiling():
                if (module, defines) not in self._modules:
                    storage = f"-DMINILLM_STORAGE={STORAGE[self.storage]}"
                    # First, since the compiler takes the first of several, and CuPy adds the one of the device.
                    own = (f"-arch=sm_{ARCHITECTURES[module]}",) if module in ARCHITECTURES else ()
                    if module in COOPERATIVE_KERNELS:
                        own = (*own, COOPERATIVE_OPTION)
                    options = (*own, storage, *self._switches, *defines, f"-DMINILLM_SOURCES={sources_digest()}")
                    self._modules[module, defines] = self._launcher.module(kernel_folder() / f"{module}.cu", options)
                function = self._kernels[key] = self._modules[module, defines].get_function(kernel)
            if shared_mem:  # more than 48 KiB with what a kernel has statically must be asked for
                function.max_dynamic_shared_size_bytes = max(shared_mem, function.max_dynamic_shared_size_bytes)
        return function if self._collected is None else _Collecting(self._collected, kernel, constants, function)

    def call(self, name: str, function: Callable[..., object], *args: Any) -> None:
        """Call what launches other kernels than ours; `collect` notes it among them. The first argument is written."""
        if self._collected is None:
            function(*args)
        else:
            self._collected.append(Launch(name, {}, Call(function), (1,), (1,), args, 0))

    def collect(self, call: Callable[[], object]) -> list[Launch]:
        """The launches that a function makes, which are not run."""
        collected: list[Launch] = []
        self._collected = collected
        try:
            call()
        finally:
            self._collected = None
        return collected


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


def or_null(array: Any | None) -> Any:
    """An array as a kernel's argument, which may be absent."""
    return NULL if array is None else array


# The numbers among a launch's arguments depend on shapes, which repeat from layer to layer, and to make them anew takes
# the host longer than to launch. So they are kept.


@lru_cache(maxsize=4096)
def int32s(*numbers: int) -> tuple[np.int32, ...]:
    """Numbers as arguments of kernels."""
    return tuple(map(np.int32, numbers))


@cache
def type_name(dtype: Any) -> str:
    """The name of a dtype, which NumPy composes each time that it is asked."""
    return str(dtype.name)


def row_stride(array: Any) -> np.int32:
    """Elements from one row to the next of [T, ...]; each row must be contiguous, as the kernels read it in vectors."""
    return _row_stride(array.shape, array.strides, array.dtype.itemsize)


@lru_cache(maxsize=4096)
def _row_stride(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> np.int32:
    size = itemsize
    for n, stride in zip(shape[:0:-1], strides[:0:-1], strict=True):
        assert n == 1 or stride == size, f"a row of {shape} is not contiguous: strides {strides}"
        size *= n
    return np.int32(strides[0] // itemsize)
