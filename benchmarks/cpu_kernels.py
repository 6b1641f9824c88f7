"""How close do products come to a CPU's limits? Memory bandwidth for few rows, FLOP/s for many, in every format.

    python benchmarks/cpu_kernels.py --inputs 768 --outputs 50272 --rows 1,8

A product of few rows should take the time of reading its weights once; one of many is bound by arithmetic, and is held
against NumPy's BLAS. The sides take turns in bursts of some 16 MB, each on other copies of the weights, 256 MB in all,
so that nothing comes from a cache. A burst of kernels is one recorded program, as in a decode step. A figure is the
fast end of its bursts (the tenth percentile of times): the speed when nothing else runs.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

from harness import (
    bandwidth_probe,
    describe,
    execute,
    headed,
    make_folder,
    new_parser,
    positive,
    positives,
    say,
    write_csv,
)

RING = 256 << 20
"""Bytes of weights in rotation, many times any last-level cache"""
BURST = 16 << 20
"""Bytes that a burst reads, at least"""
TURNS = 5
"""Bursts of each side after each probe of the bandwidth"""
REST_SECONDS = 0.05
"""Pause before each burst: after a product the threads of NumPy's BLAS go on to take their cores for 20 ms"""
FORMATS = ("float32", "float16", "bfloat16", "int8", "int4")
HEADER = ("format", "rows", "ms", "gb_per_second", "share_of_bandwidth", "gflop_per_second", "times_numpy_float32")


class Figures(NamedTuple):
    """Measurements of a product."""

    form: str
    rows: int
    nbytes: int
    """Bytes of the weights, as stored"""
    flops: int
    seconds: float
    numpy_seconds: float
    """The time of NumPy's float32 product"""
    bandwidth: float
    """GB/s of reading, the best of those probed meanwhile"""

    def row(self) -> list[object]:
        """A row of the CSV, in the order of `HEADER`."""
        speed = self.nbytes / self.seconds / 1e9
        figures = (1e3 * self.seconds, speed, speed / self.bandwidth, self.flops / self.seconds / 1e9)
        return [self.form, self.rows, *(f"{x:.3g}" for x in figures), f"{self.numpy_seconds / self.seconds:.2f}"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser("Measure the products of the CPU backend.", "CSV")
    parser.add_argument("--inputs", type=positive, default=3072, metavar="N", help="columns of the weight")
    parser.add_argument("--outputs", type=positive, default=768, metavar="N", help="rows of the weight")
    parser.add_argument("--rows", type=positives, default=(1, 4, 16, 512), metavar="N,N,...", help="of activations")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="default: all")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="probes of the bandwidth (default: 5)")
    return parser.parse_args(arguments)


def measure(form: str, rows: int, args: argparse.Namespace, probe: Callable[[], float]) -> Figures:
    """Time a product in one format, beside NumPy's in float32 and the probed bandwidth."""
    import numpy as np

    from minillm.backends.cpu.backend import CpuBackend
    from minillm.backends.weights import Weight

    plain = np.random.default_rng(0).standard_normal((args.outputs, args.inputs)).astype(np.float32)
    weight = stored(plain, form)
    x = np.random.default_rng(1).standard_normal((rows, args.inputs)).astype(np.float32)
    out = np.empty((rows, args.outputs), np.float32)
    backend = CpuBackend()

    def by_kernels(parts: list[Any]) -> None:
        for part in parts:
            backend.memory.arena.restart()  # all results go to the same memory
            backend.linear(x, Weight("product", part))

    def by_numpy(parts: list[Any]) -> None:
        for part in parts:
            np.matmul(x, part.T, out=out)

    sides = [bursts(weight, recorded(by_kernels)), bursts(plain, lambda parts: lambda: by_numpy(parts))]
    times: list[list[float]] = [[] for _ in sides]
    bandwidths: list[float] = []
    for _ in range(args.rounds):
        bandwidths.append(probe())
        for _ in range(TURNS):
            for side, taken in zip(sides, times, strict=True):
                taken.append(side())
    seconds, numpy_seconds = (float(np.percentile(taken, 10)) for taken in times)
    return Figures(form, rows, weight.nbytes, 2 * rows * plain.size, seconds, numpy_seconds, max(bandwidths))


def recorded(compute: Callable[[list[Any]], None]) -> Callable[[list[Any]], Callable[[], None]]:
    """Makes `compute` of some weights a program of launches."""
    from minillm.backends.cpu.launching import Program, recording

    def record(parts: list[Any]) -> Callable[[], None]:
        program = Program()
        with recording(program):
            compute(parts)
        assert program.complete
        return program.run

    return record


def bursts(weight: Any, prepare: Callable[[list[Any]], Callable[[], None]]) -> Callable[[], float]:
    """A function that runs the next burst, over other copies of the weight than the last. -> seconds of a product"""
    from minillm.backends.loader import HugePages

    calls = -(-BURST // weight.nbytes)
    empty = HugePages().empty
    runs = [
        prepare([copy_of(weight, empty) for _ in range(calls)]) for _ in range(max(2, RING // (calls * weight.nbytes)))
    ]
    turn = 0

    def burst() -> float:
        nonlocal turn
        time.sleep(REST_SECONDS)
        runs[turn % len(runs)]()  # wakes the threads
        turn += 1
        began = time.perf_counter()
        runs[turn % len(runs)]()
        seconds: float = (time.perf_counter() - began) / calls
        return seconds

    return burst


def copy_of(weight: Any, empty: Callable[..., Any]) -> Any:
    """A copy at another address, in memory as the backend's loader allocates it."""
    from minillm.reference.quantize import Quantized

    def copied(array: Any) -> Any:
        out = empty(array.shape, array.dtype)
        out[...] = array
        return out

    return weight.each(copied) if isinstance(weight, Quantized) else copied(weight)


def stored(weight: Any, form: str) -> Any:
    """A float32 matrix in a format."""
    from minillm.backends.formats import FORMATS as KNOWN
    from minillm.backends.storage import narrow
    from minillm.reference.quantize import quantize

    wanted = KNOWN[form]
    if wanted.scale_bits:
        return quantize(weight, wanted.bits, wanted.group)
    return weight if form == "float32" else narrow(weight, wanted)


def run(args: argparse.Namespace) -> int:
    """Measure, and write the results."""
    from minillm.backends.cpu.launching import kernels, set_threads

    kernels()  # compiled before anything is measured
    set_threads(args.threads)
    make_folder(args.out)
    probe = bandwidth_probe(args.threads)
    figures = []
    for form, rows in product(args.formats, args.rows):
        say(f"{form}, {rows} rows")
        figures.append(measure(form, rows, args, probe))
    facts = {"question": f"products of {args.inputs} inputs and {args.outputs} outputs"}
    facts |= describe(args.threads)
    table = [[str(cell) for cell in line] for line in (HEADER, *(one.row() for one in figures))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
    print("\n".join([*headed(facts), *lines]))
    path = args.out / f"cpu_kernels_{args.inputs}_{args.outputs}.csv"
    write_csv(path, facts, HEADER, [one.row() for one in figures])
    print(f"written: {path}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    return execute("cpu_kernels", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
