"""How much memory there is."""

import contextlib
import os
from pathlib import Path


def free_memory() -> int:
    """Bytes of memory that programs may still take; all there is, or 8 GiB, where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 8 << 30
