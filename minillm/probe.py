"""What this machine can do at most: a short probe of its memory and its arithmetic.

The ceilings of the roofline model (Williams, Waterman and Patterson, Commun. ACM 52, 4, 2009): an operation can be no
faster than its bytes at the full bandwidth, nor than its FLOPs at the full rate. Both are taken from what a program
reaches and not from a data sheet: a sum over much memory by all threads, and NumPy's product of large matrices.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from .ops.cost import Cost

MEBIBYTES = 128
"""That each thread reads: more than a cache holds"""
SIDE = 1536
"""Of the matrices"""
TRIES = 5
"""The best one counts: what else the machine does can only slow it down"""


class Ceilings(NamedTuple):
    """What a device can do at most."""

    bandwidth: float
    """Bytes a second, read from memory"""
    flop_rate: float
    """FLOPs a second, of float32 products"""

    def floor(self, cost: Cost) -> float:
        """Seconds below which an operation cannot come, unless its numbers lie in a processor's cache."""
        return max((cost.bytes_read + cost.bytes_written) / self.bandwidth, cost.flops / self.flop_rate)

    def bound(self, cost: Cost) -> str:
        """What holds an operation back: "memory" or "compute"."""
        return "compute" if cost.intensity > self.flop_rate / self.bandwidth else "memory"


def probe(threads: int | None = None) -> Ceilings:
    """Measure this machine, in about half a second.

    Args:
        threads: that read memory; by default as many as there are cores. Products run on those that NumPy's BLAS has.
    """
    threads = threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return Ceilings(_bandwidth(threads), _flop_rate())


def _bandwidth(threads: int) -> float:
    import numpy as np
    from threadpoolctl import threadpool_limits

    parts = np.ones((threads, MEBIBYTES << 18), np.float32)
    with ThreadPoolExecutor(threads) as pool, threadpool_limits(1, user_api="blas"):
        return parts.nbytes / _best(lambda: list(pool.map(lambda part: np.dot(part, part), parts)))


def _flop_rate() -> float:
    import numpy as np

    a = np.ones((SIDE, SIDE), np.float32)
    out = np.empty_like(a)
    return 2 * SIDE**3 / _best(lambda: np.matmul(a, a, out=out))


def _best(run: Callable[[], object]) -> float:
    """The least seconds of some tries, after one that finds threads and pages unready."""
    seconds = []
    for _ in range(TRIES + 1):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
