"""Compiling: a `.cu` file to a shared library, kept in the user's cache folder under a hash of all that went in."""

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from .toolkit import compiler, cuda_headers, missing

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
FLAGS = (
    "-std=c++17",
    "-g1",  # line tables, for messages
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",  # one copy of each variable per module, even where two modules include the same header
    "-fno-strict-aliasing",  # kernels read 16 bytes of numbers as one uint4
    "-fno-extern-tls-init",
    "-ffp-contract=off",
    "-DMINILLM_EMULATED",
    "-fmax-errors=5",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
    "-Wno-unused",
    "-Wno-psabi",
)
KERNEL = re.compile(r'extern\s+"C"\s+__attribute__\s*\(\(emulated_kernel\)\)[^(;{]*?\bvoid\s+(\w+)\s*\(')


class BuildError(Exception):
    """A source does not compile."""


def build_module(path: Path, options: tuple[str, ...]) -> tuple[ctypes.PyDLL, tuple[str, ...]]:
    """The library of a `.cu` file, and the names of its kernels."""
    if reason := missing():
        raise BuildError(reason)
    # CuPy is given a hash of all sources; here each module is rebuilt only when a file that it includes has changed.
    options = tuple(option for option in options if not option.startswith("-DMINILLM_SOURCES="))
    flags = ("-O2", *_machine_flags(), *FLAGS, *options)
    sources = [*included(path), *sorted(INCLUDE.glob("*.h"))]
    runtime = build_runtime()

    def build(target: Path) -> None:
        names = _kernel_names(path, flags)
        exports = "".join(f"EMULATED_EXPORT({name})\n" for name in names) + f'EMULATED_KERNELS("{",".join(names)}")\n'
        code = f'#include "{path.resolve()}"\n#include "launch.h"\n{exports}'
        _compile(
            code, target, (*flags, "-include", str(INCLUDE / "emulated.h"), "-shared", "-Wl,-z,defs", str(runtime))
        )

    # PyDLL keeps the interpreter's lock, so two threads of a test never run the one emulated GPU at the same time.
    library = ctypes.PyDLL(str(_cached(path.stem, sources, (*flags, str(runtime)), build)))
    library.emulated_kernels.restype = ctypes.c_char_p
    return library, tuple(library.emulated_kernels().decode().split(","))


@cache
def build_runtime() -> Path:
    """The library that all modules share."""
    flags = ("-O3", *_machine_flags(), *FLAGS)
    units = sorted((HERE / "runtime").glob("*.cpp"))
    sources = [*units, *sorted((HERE / "runtime").glob("*.h")), INCLUDE / "runtime.h"]

    def build(target: Path) -> None:
        code = "".join(f'#include "{unit}"\n' for unit in units)
        _compile(code, target, (*flags, "-shared"))

    return _cached("runtime", sources, flags, build)


def included(path: Path) -> list[Path]:
    """`path` and all files beside it that it includes, directly or not."""
    found = [path]
    for source in found:  # grows while we walk it
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', source.read_text(), re.MULTILINE):
            beside = source.parent / name
            if beside.is_file() and beside not in found:
                found.append(beside)
    return found


def _cached(name: str, sources: list[Path], flags: tuple[str, ...], build) -> Path:
    """The file that `build(target)` makes, made only once for the same sources and flags."""
    digest = hashlib.sha256()
    for part in (compiler(), *flags):
        digest.update(str(part).encode() + b"\0")
    for source in sources:
        digest.update(str(source).encode() + b"\0" + source.read_bytes() + b"\0")
    target = cache_folder() / f"{name}-{digest.hexdigest()[:20]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            unfinished = Path(folder) / target.name
            build(unfinished)
            unfinished.replace(target)  # atomic: another process sees all of it or nothing
    return target


def cache_folder() -> Path:
    """Where compiled kernels are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minillm-tests"


def _compile(code: str, target: Path | None, flags: tuple[str, ...]) -> str:
    """Compile `code` to `target`, or return it preprocessed."""
    output = ("-o", str(target)) if target else ("-E", "-P", "-o", "-")
    headers = ("-I", str(INCLUDE), "-isystem", str(cuda_headers()))
    # The source goes first: g++ resolves symbols of a source from libraries that follow it.
    command = [str(compiler()), *headers, "-x", "c++", "-", "-x", "none", *flags, *output]
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"g++ failed:\n{done.stderr.strip()}")
    return done.stdout


def _kernel_names(path: Path, flags: tuple[str, ...]) -> list[str]:
    """The kernels that are left of a source once its conditions are resolved."""
    code = _compile(f'#include "{path.resolve()}"\n', None, (*flags, "-include", str(INCLUDE / "emulated.h")))
    names = KERNEL.findall(code)
    if not names:
        raise BuildError(f'{path}: no extern "C" __global__ void kernel was found')
    return names


@cache
def _machine_flags() -> tuple[str, ...]:
    """Fused multiply-add and half conversions in one instruction where the CPU has them; else they are library calls."""
    cpu = Path("/proc/cpuinfo")
    features = set(re.findall(r"\w+", cpu.read_text())) if cpu.is_file() else set()
    return ("-march=x86-64-v3",) if {"avx2", "fma", "f16c", "bmi2"} <= features else ()
