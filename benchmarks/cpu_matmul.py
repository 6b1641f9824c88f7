"""How fast are a CPU's products of many rows? Every format of weights beside NumPy's BLAS, on prefill's shapes.

    python benchmarks/cpu_matmul.py --rows 512 --shape opt-125m --threads 2

Each round runs every format once, one after the other, under the same load; figures are 10^9
multiplications and additions a second (2 T in out / time), the median of the rounds and the best. Weights are random.
With --cpu the time is CPU time, summed over all threads: on a busy machine, and with one thread, it is more accurate
than wall-clock time.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

SHAPES = {
    "opt-125m": [(2304, 768), (768, 768), (3072, 768), (768, 3072)],
    "opt-1.3b": [(6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192)],
}


def main() -> None:
    """Read the options and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[512], help="rows of activations (default 512)")
    parser.add_argument("--shape", choices=SHAPES, default="opt-125m", help="the model whose products are run")
    parser.add_argument("--threads", type=int, default=2, help="of BLAS and kernels (default 2)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default 15)")
    parser.add_argument("--cpu", action="store_true", help="measure processor time")
    arguments = parser.parse_args()
    for name in ("OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):  # read when the libraries are imported
        os.environ[name] = str(arguments.threads)
    os.environ["OPENBLAS_THREAD_TIMEOUT"] = "4"  # else the BLAS's threads spin while the kernels run
    clock = time.process_time if arguments.cpu else time.perf_counter
    for rows in arguments.rows:
        for outputs, inputs in SHAPES[arguments.shape]:
            times = measure(products(rows, outputs, inputs), arguments.rounds, clock)
            work = 2e-9 * rows * outputs * inputs
            figures = [f"{name} {work / statistics.median(t):.0f} ({work / min(t):.0f})" for name, t in times.items()]
            print(f"{rows} x {inputs} x {outputs}: " + ", ".join(figures), flush=True)


def products(rows: int, outputs: int, inputs: int) -> dict[str, Callable[[], Any]]:
    """Name -> the product in that format, ready to be timed."""
    import numpy as np

    from minillm.backends.numba.manyrows import linear_many
    from minillm.reference.quantize import quantize

    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, inputs)).astype(np.float32)
    weight = rng.normal(size=(outputs, inputs)).astype(np.float32)
    out = np.empty((rows, outputs), np.float32)
    weights: dict[str, Any] = {
        "float32": weight,
        "float16": weight.astype(np.float16),
        "bfloat16": (weight.view(np.uint32) >> 16).astype(np.uint16),
        "int8": quantize(weight, 8),
        "int4": quantize(weight, 4),
    }

    def run(stored: Any) -> Callable[[], Any]:
        return lambda: linear_many(x, stored, None, out)

    ours = {name: run(stored) for name, stored in weights.items()}
    return {"BLAS": lambda: np.matmul(x, weight.T, out=out), **ours}


def measure(
    candidates: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each candidate in each round, after a warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, call in candidates.items():
            begin = clock()
            call()
            if turn:
                times[name].append(clock() - begin)
    return times


if __name__ == "__main__":
    main()
