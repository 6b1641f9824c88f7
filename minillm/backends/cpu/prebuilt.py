"""The libraries of C kernels that a wheel brings, compiled for several processors by `scripts/build_wheels.py`.

A wheel for one system has a library for each level of its processors, `LEVELS`. The lowest is asked which this
processor runs (`kernels/cpu/processor.c`). A library is used only if it was compiled from the sources that are
installed beside it: their digest is in its name.
"""

import ctypes
import hashlib
import platform
import sys
from pathlib import Path

from .. import kernel_sources

FOLDER = kernel_sources("prebuilt")
"""Is in wheels for one system alone: neither in a checkout nor in what is installed from the sources"""
LEVELS = {
    "x86_64": ("x86-64-v2", "x86-64-v3", "x86-64-v4", "x86-64-v4-vnni"),
    "aarch64": ("armv8", "armv8-dotprod", "armv8-i8mm"),
}
"""The libraries for a machine; the last one that `processor_level` counts is the fastest"""
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Other names of machines"""
SUFFIXES = {"win32": ".dll", "darwin": ".dylib"}


def digest(sources: Path) -> str:
    """A digest of the sources of the kernels, which are in a folder. It does not depend on how lines end."""
    total = hashlib.sha256()
    for path in sorted([*sources.glob("*.c"), *sources.glob("*.h")]):
        total.update(f"{path.name}\0".encode() + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return total.hexdigest()[:16]


def file_name(level: str, system: str, sources: Path) -> str:
    """The name of a library: level, digest of the sources, and the suffix on a system (in `sys.platform`'s words)."""
    return f"{level}-{digest(sources)}{SUFFIXES.get(system, '.so')}"


def library(sources: Path) -> Path | None:
    """The library for this processor, compiled from these sources; None if the installed package has none."""
    if not FOLDER.is_dir():
        return None
    machine = platform.machine().lower()
    names = [file_name(level, sys.platform, sources) for level in LEVELS.get(MACHINES.get(machine, machine), ())]
    paths = [path for name in names if (path := FOLDER / name).is_file()]
    if not paths:
        return None
    level = _level(paths[0])
    return next((path for path in reversed(paths) if names.index(path.name) < level), None)


def _level(lowest: Path) -> int:
    """How many levels this processor runs, as the library of the lowest says; 0 if it cannot be loaded here."""
    try:
        return int(ctypes.CDLL(str(lowest)).processor_level())
    except (OSError, AttributeError):
        return 0
