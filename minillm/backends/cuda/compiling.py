"""Compiles kernels for a GPU by NVRTC through CuPy, and reports each failure in one line.

CuPy compiles a module for the present GPU when one of its kernels is first requested, and keeps the result on disk.
`compile_for` does the same for a GPU that is not present. cupy is imported only when one of them is called.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...errors import DeviceError, install
from .kernels import Kernel, Module

OPTIONS = ("--std=c++17", "-lineinfo")
"""With line numbers, which cost nothing when a kernel runs, and which profilers and sanitizers name"""
LEAST_ARCHITECTURE = 80
"""The first with asynchronous copies to shared memory, and products of bfloat16"""
_FIRST_ERROR = re.compile(r"^(?P<file>[^\n]+?)\((?P<line>\d+)\): (?:catastrophic )?error: (?P<what>.+)$", re.MULTILINE)
_NO_HEADER = re.compile(r"(?:could not|cannot) open source file \"(?P<name>[^\"]+)\"")

_MISSING = re.compile(r"failed to (load|find)|not found", re.IGNORECASE)
"""In CuPy's RuntimeErrors about a library that it opens, or headers that it looks for, when they are first needed"""


class CupyLauncher:
    """Compiles with `cupy.RawModule` and launches on the current device and stream of CuPy."""

    def __init__(self, carveout: int | None = None) -> None:
        """Check that there is a GPU.

        `carveout`: percent of a multiprocessor's L1 cache that all kernels have as shared memory, so that none has it
        divided anew; at least what they need. None: each as the driver chooses.

        Raises:
            DeviceError: CuPy is not installed, it finds no driver or no GPU, or one that lacks instructions of the
                kernels.
        """
        self._cupy, self._carveout = import_cupy(), carveout
        try:
            count = self._cupy.cuda.runtime.getDeviceCount()
        except RuntimeError as error:  # CUDARuntimeError is one
            raise DeviceError(f"device 'cuda' needs an NVIDIA GPU and its driver: {error}") from None
        if count == 0:
            raise DeviceError("device 'cuda' needs an NVIDIA GPU: the driver shows none")
        device = self._cupy.cuda.Device()
        self.architecture = str(device.compute_capability)
        if int(self.architecture) < LEAST_ARCHITECTURE:
            raise DeviceError(
                f"device 'cuda' needs a GPU of compute capability {_dotted(LEAST_ARCHITECTURE)} or later (A100, RTX 30 "
                f"and newer), and GPU {device.id} has {_dotted(self.architecture)}: use device 'cpu'"
            )
        self.processors = int(device.attributes["MultiProcessorCount"])

    def module(self, path: Path, options: tuple[str, ...]) -> Module:
        """The module of a `.cu` file, with options such as -DNAME=VALUE; compiled when a kernel is first requested."""
        source, options = _for_nvrtc(path, options)
        return _CupyModule(path, self._cupy.RawModule(code=source, options=options), self._carveout)


class _CupyModule:
    """A `cupy.RawModule` that raises `DeviceError`."""

    def __init__(self, path: Path, module: Any, carveout: int | None = None) -> None:
        self._path = path
        self._module, self._carveout = module, carveout

    def get_function(self, name: str) -> Kernel:
        """The kernel `name`.

        Raises:
            DeviceError: the source does not compile, or a part of the toolkit is missing.
        """
        with _errors_in_one_line(self._path):
            kernel = self._module.get_function(name)
        if self._carveout is not None:
            kernel.preferred_shared_memory_carveout = self._carveout
        made: Kernel = kernel
        return made


def compile_for(arch: str, path: Path, options: tuple[str, ...], kind: str = "cubin") -> tuple[bytes, str]:
    """Compile as CuPy would on a GPU of `arch`, such as "90", without that GPU.

    It uses private names of CuPy, so it serves tests and scripts, not the engine.

    Returns:
        The cubin, or the PTX where `kind` is "ptx"; and the compiler's report of registers, spills and shared memory.

    Raises:
        DeviceError: the source does not compile, or a part of the toolkit is missing.
    """
    import_cupy()
    from cupy._core import core
    from cupy.cuda import compiler

    source, options = _for_nvrtc(path, options)
    # What CuPy adds to the options of a RawModule, and the architecture that it would read from the device.
    options = (*core.assemble_cupy_compiler_options(options), "-ftz=true", "--device-as-default-execution-space")
    target = f"-arch=sm_{arch}" if kind == "cubin" else f"-arch=compute_{arch}"
    report = io.StringIO()
    with _errors_in_one_line(path):
        program = compiler._NVRTCProgram(source, str(path), method=kind)
        compiled, _ = program.compile((*options, target, "--ptxas-options=-v"), report)
    return compiled if isinstance(compiled, bytes) else compiled.encode(), report.getvalue()


def import_cupy() -> Any:
    """The module cupy.

    Raises:
        DeviceError: it is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            f"device 'cuda' needs CuPy ({error}): {install('cuda13')}, or cuda12 for a driver before 580"
        ) from None
    return cupy


def _dotted(architecture: int | str) -> str:
    """Compute capability as NVIDIA writes it."""
    digits = str(architecture)
    return f"{digits[:-1]}.{digits[-1]}"


def _for_nvrtc(path: Path, options: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Source and options, such that messages name the file and headers are found next to it."""
    return f'#line 1 "{path.name}"\n{path.read_text()}', (*OPTIONS, f"-I{path.parent}", *options)


@contextmanager
def _errors_in_one_line(path: Path) -> Iterator[None]:
    from cupy.cuda.compiler import CompileException

    try:
        yield
    except CompileException as error:
        raise DeviceError(_first_error(path, error.get_message())) from None
    except RuntimeError as error:
        if not _MISSING.search(str(error)):
            raise
        said = " ".join(str(error).split())
        raise DeviceError(f"a part of the CUDA toolkit is missing ({said}): {_install()}") from None


def _first_error(path: Path, log: str) -> str:
    error = _FIRST_ERROR.search(log)
    if not error:  # ptxas names no line of the source
        return f"kernel {path.name} does not compile: {' '.join(log.strip(chr(0)).split())[:300]}"
    header = _NO_HEADER.search(error["what"])
    if header and not (path.parent / header["name"]).exists() and header["name"].startswith("cuda"):
        return f"the headers of the CUDA toolkit are missing ({header['name']}): {_install()}"
    return f"kernel {path.name} does not compile: {Path(error['file']).name}:{error['line']}: {error['what']}"


def _install() -> str:
    try:
        version("cupy-cuda12x")
    except PackageNotFoundError:
        return install("cuda13")
    return install("cuda12")
