"""How close do products of few rows come to the memory bandwidth?

    python benchmarks/cpu_kernels.py --threads 2
    python benchmarks/cpu_kernels.py --inputs 768 --outputs 50272 --rows 1 8

For each format: GB/s of weights read, its share of the bandwidth that a plain sum over memory reaches, GFLOP/s, and
how many times faster than NumPy's float32 product it is. The sides take turns in bursts of some 16 MB, each
on other parts of 256 MB of weights, so that nothing comes from a cache and other load disturbs few of them. A
figure is the fast end of its bursts (the tenth percentile of times): the kernel's speed when it is undisturbed.
"""

import argparse
import os
import time
from collections.abc import Callable
from itertools import product
from typing import Any

from harness import available_cores, positive, thread_environment

RING = 256 << 20
"""Bytes of weights in rotation, many times any last-level cache."""
BURST = 16 << 20
"""Bytes that a burst reads."""
FORMATS = ("float32", "float16", "bfloat16", "int8", "int4")


def main() -> None:
    arguments = parse()
    os.environ.update(thread_environment(arguments.threads))
    from minillm.backends.numba.compiling import set_threads

    set_threads(arguments.threads)
    print("format     rows  probe GB/s   GB/s  share  GFLOP/s  x NumPy float32")
    for form, rows in product(arguments.formats, arguments.rows):
        print(measure(form, rows, arguments), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--inputs", type=positive, default=3072, help="columns of the weight")
    parser.add_argument("--outputs", type=positive, default=768, help="rows of the weight")
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 2, 4, 8, 16], help="rows of activations")
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=list(FORMATS))
    parser.add_argument("--seconds", type=positive, default=4, help="for each line")
    parser.add_argument("--threads", type=positive, default=available_cores())
    return parser.parse_args()


def measure(form: str, rows: int, arguments: argparse.Namespace) -> str:
    """One line of the table."""
    import numpy as np

    from minillm.backends.numba.fewrows import linear_few

    plain = np.random.default_rng(0).standard_normal((arguments.outputs, arguments.inputs)).astype(np.float32)
    weight = store(plain, form)
    x = np.ones((rows, arguments.inputs), np.float32)
    out = np.empty((rows, arguments.outputs), np.float32)
    sides = [
        ring(np.ones(plain.size, np.int64), probe_kernel()),
        ring(weight, lambda w: linear_few(x, w, None, out)),
        ring(plain, lambda w: np.matmul(x, w.T, out=out)),
    ]
    times: list[list[float]] = [[] for _ in sides]
    end = time.perf_counter() + arguments.seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for side, taken in zip(sides, times, strict=True):
            taken.append(side())
    probe, ours, numpy_s = (float(np.percentile(taken[1:], 10)) for taken in times)  # seconds a byte, a call, a call
    bandwidth, speed = 1 / (probe / (8 * plain.size)) / 1e9, weight.nbytes / ours / 1e9
    return (
        f"{form:9} {rows:5} {bandwidth:11.1f} {speed:6.1f} {speed / bandwidth:6.2f} "
        f"{2 * rows * plain.size / ours / 1e9:8.0f} {numpy_s / ours:16.2f}"
    )


def ring(weight: Any, run: Callable[[Any], Any]) -> Callable[[], float]:
    """Bursts of `run` over copies of a weight, one copy after the other; each says how long a call took."""
    copies = [copy_of(weight) for _ in range(max(2, RING // weight.nbytes))]
    calls = max(1, BURST // weight.nbytes)
    position = 0

    def burst() -> float:
        nonlocal position
        start = time.perf_counter()
        for _ in range(calls):
            run(copies[position % len(copies)])
            position += 1
        seconds: float = (time.perf_counter() - start) / calls
        return seconds

    return burst


def copy_of(weight: Any) -> Any:
    """A copy at another address."""
    from minillm.reference.quantize import Quantized

    if isinstance(weight, Quantized):
        return Quantized(weight.values.copy(), weight.scales.copy(), weight.inputs)
    return weight.copy()


def store(weight: Any, form: str) -> Any:
    """A float32 matrix in a format."""
    import numpy as np

    from minillm.reference.quantize import quantize

    if form == "bfloat16":
        return (weight.view(np.uint32) >> 16).astype(np.uint16)
    if form in ("int8", "int4"):
        return quantize(weight, 8 if form == "int8" else 4)
    return weight.astype(form)


def probe_kernel() -> Callable[[Any], Any]:
    """A sum over memory by all threads: the upper bound of reading."""
    import numpy as np
    from numba import types

    from minillm.backends.numba.arguments import vector
    from minillm.backends.numba.compiling import shared_kernel
    from minillm.backends.numba.launching import launch

    parts = 64

    @shared_kernel(types.int64)
    def add(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
        numbers, totals = vector(arguments, 0, np.int64), vector(arguments, 2, np.int64)
        total = 0
        for i in range(len(numbers) * share // shares, len(numbers) * (share + 1) // shares):
            total += numbers[i]
        totals[share] = total

    def probe(numbers: Any) -> Any:
        totals = np.empty(parts, np.int64)
        launch(add, numbers, totals, shares=parts)
        return totals.sum()

    return probe


if __name__ == "__main__":
    main()
