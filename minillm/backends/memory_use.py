"""Memory that is in use on a device, and that is left on the host."""

import contextlib
import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import NamedTuple


def free_memory() -> int:
    """Bytes of memory available; the total, or 8 GiB, where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 8 << 30


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
