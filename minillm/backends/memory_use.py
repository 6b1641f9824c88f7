"""Memory that is in use on a device, and that is left on the host."""

import contextlib
import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import NamedTuple

CGROUP = Path("/sys/fs/cgroup")
"""The files in which Linux says how much memory a container may use, and uses (cgroup v2)"""


def free_memory() -> int:
    """Bytes of memory available, to a container within its limit; the total where the system does not say."""
    free = total_memory()
    with contextlib.suppress(OSError, LookupError):  # the line came with Linux 3.14
        free = 1024 * _numbers(Path("/proc/meminfo"))["MemAvailable:"]
    with contextlib.suppress(OSError, LookupError, ValueError):
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        cached = _numbers(CGROUP / "memory.stat")["file"]  # pages of files, which are given up when memory is short
        free = min(free, max(0, int((CGROUP / "memory.max").read_text(encoding="ascii")) - used + cached))
    return free


def total_memory() -> int:
    """Bytes of memory of the machine, or of a container's limit; 8 GiB where the system does not say."""
    total = 8 << 30
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int((CGROUP / "memory.max").read_text(encoding="ascii")))
    return total


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by its first word."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text(encoding="ascii").splitlines())}


def trim_heap() -> None:
    """Give memory that nothing refers to any more back to the system; the C library would keep most of it."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # musl has no such function
            ctypes.CDLL(None).malloc_trim(0)


class MemoryUse(NamedTuple):
    """Bytes on a device."""

    weights: int
    cache: int
    workspace: int
    """Results of steps, block tables, scratch memory of kernels"""
    number_bytes: int
    """Bytes of a weight, a result or a cached number; biases and gains take 4"""
    largest_tokens: int
    """The most tokens in one forward pass so far"""
    largest_rows: int
    """The most rows of logits in one forward pass so far"""
