"""Hardware peak rates: published chips, and a probe of this machine.

Rates are for dense matrix products (no sparsity) with float32 accumulation; GB and TB are powers of ten, as in data
sheets. A time computed from these numbers is a lower bound, not a prediction.
"""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...backends.memory_use import free_memory
from ...errors import ParameterError

THIS = "this"
PROBE_BYTES = 256 << 20
"""Bytes read by the probe: more than the caches hold"""
PROBE_SIZE = 1536
"""Rows and columns of the probe's matrix product"""
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Peak rates and memory of one machine."""

    name: str
    rates: Mapping[str, float]
    """dtype -> peak FLOP/s of matrix products"""
    bandwidth: float
    """Memory bandwidth in bytes/s"""
    memory: int
    """Bytes"""
    source: str
    link: float = 0.0
    """Bytes/s from one such device to another; 0: not known"""
    link_name: str = ""

    def rate(self, dtype: str) -> float:
        """Peak FLOP/s.

        Raises:
            ParameterError: no rate is known for this dtype.
        """
        if dtype not in self.rates:
            raise ParameterError(f"{self.name} has no rate for {dtype}: expected one of {', '.join(self.rates)}")
        return self.rates[dtype]

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """Lower bound of an operation's time: arithmetic or memory traffic, whichever takes longer (the roofline)."""
        return max(flops / self.rate(dtype), moved / self.bandwidth)


def _chip(
    name: str, fp32: float, half: float, bandwidth: float, memory: float, link: tuple[str, float], source: str
) -> Hardware:
    """A chip from TFLOP/s, GB/s and GB; `link` by its name and GB/s each way."""
    return Hardware(
        name=name,
        rates={"float32": fp32 * 1e12, "float16": half * 1e12, "bfloat16": half * 1e12},
        bandwidth=bandwidth * 1e9,
        memory=int(memory * 1e9),
        source=source,
        link=link[1] * 1e9,
        link_name=link[0],
    )


_PCIE = "PCIe 4.0 x16", 32.0


CHIPS: dict[str, Hardware] = {
    "a100": _chip(
        "A100 SXM 80 GB", 19.5, 312, 2039, 80, ("NVLink 3", 300), "NVIDIA A100 Tensor Core GPU data sheet, 2021"
    ),
    "h100": _chip(
        "H100 SXM",
        67,
        989.5,
        3350,
        80,
        ("NVLink 4", 450),
        "NVIDIA H100 Tensor Core GPU data sheet, 2023; half of 'sparse'",
    ),
    "h200": _chip(
        "H200 SXM",
        67,
        989.5,
        4800,
        141,
        ("NVLink 4", 450),
        "NVIDIA H200 Tensor Core GPU data sheet, 2024; half of 'sparse'",
    ),
    "rtx4090": _chip(
        "RTX 4090", 82.6, 165.2, 1008, 24, _PCIE, "NVIDIA Ada GPU Architecture white paper v2.1, appendix A"
    ),
    "l4": _chip("L4", 30.3, 121, 300, 24, _PCIE, "NVIDIA L4 Tensor Core GPU data sheet, 2023; half of 'sparse'"),
}
"""Name -> chip. float32 is the rate of its CUDA cores, without TF32; a link has half of the data sheet's both ways."""


def find_hardware(name: str) -> Hardware:
    """A published chip by its name, or this machine, which is probed for about a second.

    Raises:
        ParameterError: the name is unknown; the message lists the known ones.
    """
    if name == THIS:
        return probe()
    if name not in CHIPS:
        raise ParameterError(f"hardware {name!r} is not known: expected one of {', '.join([*CHIPS, THIS])}")
    return CHIPS[name]


def probe() -> Hardware:
    """Measure this machine's memory bandwidth and FLOP/s: the best of a few short rounds.

    Bandwidth is measured by reading with one thread per core; the rate by a float32 product of NumPy's BLAS with its
    configured threads.
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
    """Bytes/s of reading `size` bytes, split evenly over threads."""
    import numpy as np

    pieces = np.array_split(np.ones(size // 4, np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        return size / best_of(lambda: list(pool.map(np.max, pieces)))  # NumPy releases the GIL meanwhile


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
