"""Runs a learner's CUDA kernel: its traffic is counted on the emulator, its time is measured where there is a GPU."""

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.cuda.compiling import CupyLauncher
from ..backends.cuda.emulator import Emulator, Traffic, count_traffic, missing
from ..backends.cuda.emulator.traffic import COUNTED
from ..errors import DeviceError, UsageError

THREADS = 128
"""Threads of a block: four warps"""


@dataclass(frozen=True)
class Run:
    """A launch of a kernel `gemv(const float* W, const float* x, float* y, int rows, int n)`."""

    y: NDArray[np.float32]
    """Results, [size]"""
    weight: Traffic
    vector: Traffic
    seconds: float | None
    """The best of five launches; None without a GPU"""

    @property
    def used(self) -> float:
        """The part of the bytes moved for W that threads asked for, from 0 to 1."""
        return self.weight.bytes_used / self.weight.bytes_moved

    def __repr__(self) -> str:
        time = "no GPU, no time" if self.seconds is None else f"{1e6 * self.seconds:.1f} us"
        return (
            f"W: {self.weight.requests} requests of {self.weight.sectors / self.weight.requests:.0f} sectors,"
            f" {self.used:.0%} of their bytes used; x: {self.vector.requests} requests; {time}"
        )


def run_gemv(source: str, W: Any, x: Any, threads: float = 1, size: int | None = None) -> Run:
    """Launch the kernel `gemv` of a CUDA source, in blocks of 128 threads.

    Args:
        source: CUDA C++, with `extern "C" __global__ void gemv(...)`
        W: the matrix [rows, n]; taken as float32
        x: the vector, as long as the kernel reads it; likewise
        threads: for each number of y; 32 is a warp each, 8 a warp for four
        size: numbers of y (default: the rows of W)

    Raises:
        UsageError: there is no C++ compiler, or no Linux.
        BuildError: the source does not compile.
        LaunchError: the kernel did what a GPU would not allow, such as a read outside an array.
    """
    if reason := missing():
        raise UsageError(f"the lesson compiles CUDA for this processor: {reason}")
    rows, n = W.shape
    size = rows if size is None else size
    W, x = np.ascontiguousarray(W, np.float32), np.ascontiguousarray(x, np.float32)
    grid = (-(-int(size * threads) // THREADS),)
    emulator = Emulator(checks=True)
    emulator.log_capacity = 1 << 20
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gemv.cu"
        path.write_text(source, encoding="utf-8")
        kernel = emulator.module(path, COUNTED).get_function("gemv")
        y = np.full(size, np.nan, np.float32)
        kernel(grid, (THREADS,), (W, x, y, np.int32(rows), np.int32(n)))
        seconds = _seconds(path, grid, W, x, y)
    return Run(y, count_traffic(emulator.accesses[0]), count_traffic(emulator.accesses[1]), seconds)


def _seconds(path: Path, grid: tuple[int], W: Any, x: Any, y: Any) -> float | None:
    """The least time of a launch on a GPU, in seconds; None without one."""
    gpu = _gpu()
    if gpu is None:
        return None
    import cupy

    kernel = gpu.module(path, ()).get_function("gemv")
    args = cupy.asarray(W), cupy.asarray(x), cupy.asarray(y), np.int32(W.shape[0]), np.int32(W.shape[1])
    kernel(grid, (THREADS,), args)
    times = []
    for _ in range(5):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        kernel(grid, (THREADS,), args)
        stop.record()
        stop.synchronize()
        times.append(1e-3 * cupy.cuda.get_elapsed_time(start, stop))
    return float(min(times))


@cache
def _gpu() -> CupyLauncher | None:
    """Compiles for the GPU, if there is one."""
    try:
        return CupyLauncher()
    except DeviceError:
        return None
