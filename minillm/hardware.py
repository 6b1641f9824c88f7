"""What machines can do: published chips, and a probe of this one.

Rates are of dense matrix products (no sparsity), with sums in float32; GB and TB are powers of ten, as the data sheets
print them. A floor in time from these numbers is what no run can beat, not what one reaches.
"""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .backends.memory import free_memory
from .errors import ParameterError

THIS = "this"
PROBE_BYTES = 256 << 20
"""Read once by the probe: more than caches hold"""
PROBE_SIZE = 1536
"""Rows and columns of the product that the probe times"""
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What bounds a computation."""

    name: str
    rates: Mapping[str, float]
    """Peak FLOP/s of products of numbers in this dtype"""
    bandwidth: float
    """Bytes/s that memory delivers"""
    memory: int
    """Bytes"""
    source: str

    def rate(self, dtype: str) -> float:
        """Peak FLOP/s.

        Raises:
            ParameterError: no rate is known for this dtype.
        """
        if dtype not in self.rates:
            raise ParameterError(f"{self.name} has no rate for {dtype}: expected one of {', '.join(self.rates)}")
        return self.rates[dtype]

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """The floor of an operation: its arithmetic or its bytes, whichever takes longer (the roofline)."""
        return max(flops / self.rate(dtype), moved / self.bandwidth)


def _chip(name: str, fp32: float, half: float, bandwidth: float, memory: float, source: str) -> Hardware:
    """A chip from TFLOP/s, GB/s and GB."""
    rates = {"float32": fp32 * 1e12, "float16": half * 1e12, "bfloat16": half * 1e12}
    return Hardware(name=name, rates=rates, bandwidth=bandwidth * 1e9, memory=int(memory * 1e9), source=source)


CHIPS: dict[str, Hardware] = {
    "a100": _chip("A100 SXM 80 GB", 19.5, 312, 2039, 80, "NVIDIA A100 Tensor Core GPU data sheet, 2021"),
    "h100": _chip("H100 SXM", 67, 989.5, 3350, 80, "NVIDIA H100 Tensor Core GPU data sheet, 2023; half of 'sparse'"),
    "h200": _chip("H200 SXM", 67, 989.5, 4800, 141, "NVIDIA H200 Tensor Core GPU data sheet, 2024; half of 'sparse'"),
    "rtx4090": _chip("RTX 4090", 82.6, 165.2, 1008, 24, "NVIDIA Ada GPU Architecture white paper v2.1, appendix A"),
    "l4": _chip("L4", 30.3, 121, 300, 24, "NVIDIA L4 Tensor Core GPU data sheet, 2023; half of 'sparse'"),
}
"""Name -> chip. float32 is the rate of its CUDA cores, without TF32."""


def find_hardware(name: str) -> Hardware:
    """A published chip by its name, or this machine, which is probed for about a second.

    Raises:
        ParameterError: the name is not known; the message lists those that are.
    """
    if name == THIS:
        return probe()
    if name not in CHIPS:
        raise ParameterError(f"hardware {name!r} is not known: expected one of {', '.join([*CHIPS, THIS])}")
    return CHIPS[name]


def probe() -> Hardware:
    """What this machine's memory and processor deliver: the best of a few short rounds.

    Bandwidth is that of reading, by as many threads as there are cores; the rate is that of a float32 product of
    NumPy's BLAS, with the threads that it has been given.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Hardware(
        name="this machine",
        rates={"float32": product_rate()},
        bandwidth=read_bandwidth(cores),
        memory=free_memory(),
        source=f"probed with {cores} threads",
    )


def read_bandwidth(threads: int, size: int = PROBE_BYTES) -> float:
    """Bytes/s of reading `size` bytes, cut into a piece for each thread."""
    import numpy as np

    pieces = np.array_split(np.ones(size // 4, np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        return size / best_of(lambda: list(pool.map(np.max, pieces)))  # NumPy lets go of Python's lock meanwhile


def product_rate(size: int = PROBE_SIZE) -> float:
    """FLOP/s of a float32 product [size, size] x [size, size]."""
    import numpy as np

    a = np.ones((size, size), np.float32)
    out = np.empty_like(a)
    return 2 * size**3 / best_of(lambda: np.matmul(a, a, out=out))


def best_of(run: Callable[[], object]) -> float:
    """Seconds of the fastest of a few rounds; the first is not counted."""
    run()
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken)
