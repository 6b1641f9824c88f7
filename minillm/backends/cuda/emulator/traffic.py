"""Counts the memory that the warps of a launch ask for, from the addresses of its loads and stores.

A GPU takes the loads of a warp's 32 threads by one instruction as one request, and serves it in sectors of 32 bytes,
four to a line of the cache (CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory"). How many of them its
caches answer depends on what else runs, so it is not counted here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

ACCESS = np.dtype(
    [
        *(("instruction", "u8"), ("offset", "u8"), ("extent", "u4"), ("block", "u4"), ("thread", "u2")),
        *(("bytes", "u1"), ("is_write", "u1"), ("unused", "u4")),
    ]
)
"""emulation::LoggedAccess of include/runtime.h"""
AccessLog = np.ndarray[Any, np.dtype[Any]]

COUNTED = ("-fno-tree-sra",)
"""Options of a module whose traffic is counted: without them g++ splits a load of 16 bytes into four"""

SECTOR, LINE = 32, 128


@dataclass(frozen=True)
class Traffic:
    """Counts of all warps' loads and stores in one array."""

    requests: int
    """Instructions of a warp that load or store"""
    sectors: int
    """32 bytes each, summed over the requests"""
    lines: int
    """128 bytes each, summed over the requests"""
    bytes_used: int
    """Bytes that threads asked for: those of one request that are the same, once"""

    @property
    def bytes_moved(self) -> int:
        """Bytes of all sectors."""
        return SECTOR * self.sectors


def count_traffic(accesses: AccessLog) -> Traffic:
    """Count the requests of `accesses` [n] to an array that begins at a multiple of 128 bytes, as allocators give it.

    The k-th time that a thread comes to an instruction belongs to the same request as the k-th time of the other
    threads of its warp.
    """
    order = np.lexsort((accesses["thread"], accesses["block"], accesses["instruction"]))  # stable: by time in each
    log = accesses[order]
    starts = np.ones(len(log), bool)
    for name in ("thread", "block", "instruction"):
        starts[1:] &= log[name][1:] == log[name][:-1]
    starts[1:] = ~starts[1:]
    first = np.maximum.accumulate(np.where(starts, np.arange(len(log)), 0))
    times = np.arange(len(log)) - first  # how often the thread came there before
    columns = log["instruction"], log["block"], log["thread"] // 32, times
    requests, number = np.unique(np.stack([c.astype(np.int64) for c in columns], 1), axis=0, return_inverse=True)

    def distinct(size: int) -> int:
        """Pairs of a request and a piece of memory of `size` bytes that it touches."""
        pairs: set[tuple[int, int]] = set()
        for request, offset, length in zip(number.ravel(), log["offset"], log["bytes"], strict=True):
            pairs.update((int(request), piece) for piece in range(offset // size, (offset + length - 1) // size + 1))
        return len(pairs)

    return Traffic(len(requests), distinct(SECTOR), distinct(LINE), distinct(1))
