"""Compiling: a `.cu` file to a shared library, kept in the user's cache folder under a hash of all that went in."""

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from .toolkit import compiler, cuda_headers, missing

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
FLAGS = (
    "-std=c++17",
    "-g1",  # line tables, for messages
    "-gdwarf-4",  # addr2line takes the wrong file from some of version 5
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",  # one copy of each variable per module, even where two modules include the same header
    "-fno-semantic-interposition",
    "-fno-strict-aliasing",  # kernels read 16 bytes of numbers as one uint4
    "-fno-extern-tls-init",
    "-ffp-contract=off",
    "-fmax-errors=5",
    "-w",  # pragmas and attributes of CUDA would all be warned of; nvcc is the one to listen to
    "-DMINILLM_EMULATED",
)
CHECKS = (
    "-fsanitize=thread,bounds,alignment,shift-exponent,signed-integer-overflow,integer-divide-by-zero",
    "--param=tsan-instrument-func-entry-exit=0",
)
"""Instrumentation by g++ in a build with checks: calls that runtime/races.cpp and runtime/undefined.cpp answer."""

PRECOMPILED = "emulated.h.gch"
KERNEL = re.compile(r'extern\s+"C"\s+__attribute__\s*\(\(emulated_kernel\)\)[^(;{]*?\bvoid\s+(\w+)\s*\(')


class BuildError(Exception):
    """A source does not compile."""


def build_module(path: Path, options: Iterable[str], *, checks: bool) -> tuple[ctypes.PyDLL, tuple[str, ...]]:
    """The library of a `.cu` file, and the names of its kernels.

    Raises:
        BuildError: g++ refuses the source, or is missing.
    """
    if reason := missing():
        raise BuildError(reason)
    path = path.resolve()
    runtime = build_runtime()
    # -O1 takes a sixth less time to compile than -O2, and tests take no longer.
    common = ("-O1", *_machine_flags(), *FLAGS, *(CHECKS if checks else ()))
    # CuPy is given a hash of all sources; here each module is rebuilt only when a file that it includes has changed.
    defines = [option for option in options if not option.startswith(("-DMINILLM_SOURCES=", "-arch="))]
    flags = (*common, f"-ffile-prefix-map={path.parent}/=", *defines)

    def build(target: Path) -> None:
        forced = (*_include_folders(build_headers(common)), "-include", "emulated.h")
        source = target.with_suffix(".cpp")
        source.write_text(f'#include "{path}"\n')
        # -fpch-preprocess leaves out what is precompiled, 1 MB of text: this takes a fifth of the time.
        names = _kernel_names(path, _run((*forced, *flags, "-E", "-P", "-fpch-preprocess", str(source))))
        exports = "".join(f"EMULATED_EXPORT({name})\n" for name in names)
        source.write_text(f'#include "{path}"\n#include "launch.h"\n{exports}EMULATED_KERNELS("{",".join(names)}")\n')
        compiled = target.with_suffix(".o")
        _run((*forced, *flags, "-c", str(source), "-o", str(compiled)))
        # Linked without the checks' flags, which would bring libtsan: the runtime is all there is to answer them.
        _run(("-shared", "-Wl,-z,defs", str(compiled), str(runtime), "-o", str(target)))
        compiled.unlink()

    sources = [*_included(path), *sorted(INCLUDE.rglob("*"))]
    # PyDLL keeps the interpreter's lock, so two threads of a test never run the one emulated GPU at the same time.
    library = ctypes.PyDLL(str(_cached(f"{path.stem}.so", sources, (*flags, str(runtime)), build)))
    library.emulated_kernels.restype = ctypes.c_char_p
    return library, tuple(library.emulated_kernels().decode().split(","))


@cache
def build_runtime() -> Path:
    """The library that all modules share."""
    flags = ("-O3", *_machine_flags(), *FLAGS, "-shared", "-Wl,-Bsymbolic")
    units = sorted((HERE / "runtime").glob("*.cpp"))

    def build(target: Path) -> None:
        _run((*_include_folders(), *flags, *map(str, units), "-o", str(target)))

    sources = [*units, *sorted((HERE / "runtime").glob("*.h")), INCLUDE / "runtime.h"]
    return _cached("runtime.so", sources, flags, build)


@cache
def build_headers(flags: tuple[str, ...]) -> Path:
    """emulated.h, with all of NVIDIA's headers, precompiled for `flags`: they take most of the time of a build."""

    def build(target: Path) -> None:
        target.mkdir()
        _run(
            (
                *_include_folders(),
                *flags,
                "-x",
                "c++-header",
                str(INCLUDE / "emulated.h"),
                "-o",
                str(target / PRECOMPILED),
            )
        )

    return _cached("headers", sorted(INCLUDE.rglob("*")), flags, build)


def cache_folder() -> Path:
    """The folder of compiled kernels, kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minillm-tests"


def _cached(name: str, sources: Iterable[Path], flags: Iterable[str], build: Callable[[Path], None]) -> Path:
    """The result of `build(target)`, made only once for the same sources and flags."""
    digest = hashlib.sha256()
    for part in (compiler(), cuda_headers(), *flags):
        digest.update(str(part).encode() + b"\0")
    for source in (Path(__file__), *sources):
        if source.is_file():
            digest.update(str(source).encode() + b"\0" + source.read_bytes() + b"\0")
    target = cache_folder() / digest.hexdigest()[:20] / name
    if target.exists():
        os.utime(target.parent)  # in use
    else:
        _forget_old()
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            build(Path(folder) / name)
            try:
                Path(folder).rename(target.parent)  # atomic: another process sees all of it or nothing
            except OSError:
                if not target.exists():
                    raise  # not because another process was first
            else:
                Path(folder).mkdir()  # for TemporaryDirectory to remove
    return target


def _forget_old() -> None:
    """Make the cache folder, or remove from it what no test has used for a month."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    for entry in cache_folder().iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process is at the same
            if time.time() - entry.stat().st_mtime > 30 * 24 * 3600:
                shutil.rmtree(entry, ignore_errors=True)


def _included(path: Path) -> list[Path]:
    """`path` and all files beside it that it includes, directly or not."""
    sources = [path]
    for source in sources:  # grows while we walk it
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', source.read_text(), re.MULTILINE):
            beside = source.parent / name
            if beside.is_file() and beside not in sources:
                sources.append(beside)
    return sources


def _include_folders(*first: Path) -> tuple[str, ...]:
    return (*(f"-I{folder}" for folder in (*first, INCLUDE)), "-isystem", str(cuda_headers()))


def _run(arguments: Iterable[str]) -> str:
    """Run g++; what it prints."""
    done = subprocess.run([str(compiler()), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"g++ refuses it:\n{done.stderr.strip()}")
    return done.stdout


def _kernel_names(path: Path, preprocessed: str) -> list[str]:
    """The kernels that are left of a source once its conditions are resolved."""
    names = KERNEL.findall(preprocessed)
    if not names:
        raise BuildError(f'{path}: no extern "C" __global__ void kernel is left with these options')
    return names


@cache
def _machine_flags() -> tuple[str, ...]:
    """Fused multiply-add and half conversions as instructions where the CPU has them; else they are slow calls."""
    cpu = Path("/proc/cpuinfo")
    features = set(re.findall(r"\w+", cpu.read_text())) if cpu.is_file() else set()
    return ("-march=x86-64-v3",) if {"avx2", "fma", "f16c", "bmi2"} <= features else ()
