"""How fast is minillm on a GPU? One command, which takes less than 8 minutes on an H200.

    python benchmarks/gpu.py

It runs these parts, one after the other, each in a process of its own and with a time limit:

    tests         the kernels' tests, on the GPU in place of the emulator
    ceilings      a large copy and large library products: the upper bounds for everything else
    kernels       each kernel alone, in the sizes of each shape
    engine        decode steps and prefill of whole models with random weights
    transformers  the same by transformers, eager and compiled
    sanitizer     memcheck and racecheck of the kernels, where compute-sanitizer is installed

A part that fails or runs out of time is reported in the table; the others run all the same. Results are written as they
come.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]  # minillm need not be installed

from gpu_figures import HEADER, Ceilings, Figure, goals, row, table  # noqa: E402
from harness import RESULTS, BenchmarkError, describe, make_folder, positive, say, write_csv, write_result  # noqa: E402

LIMITS = {"tests": 100, "ceilings": 25, "kernels": 80, "engine": 100, "transformers": 95, "sanitizer": 60}
"""Part -> seconds that it may take."""
BUDGET = 460
SHAPES = ("opt-125m", "opt-1.3b", "opt-6.7b", "opt-13b")
"""Shapes that fit into the budget. Others are given by name: --shapes tinyllama-1.1b,llama-3.1-8b"""
EMULATED = ("emulated-llama", "emulated")
"""Tiny shapes for --emulated, with each kind of layer (`gpu_part.EMULATED_SHAPES`)."""
LEAST_SECONDS = 5
PACKAGES = ("minillm", "numpy", "cupy-cuda13x", "cupy-cuda12x", "ml_dtypes", "torch", "transformers", "pytest")


class Run:
    """The parts that ran so far, and where their results go."""

    def __init__(self, out: Path, shapes: Sequence[str], *, emulated: bool) -> None:
        make_folder(out)
        self.figures: list[Figure] = []
        self._stem = out / ("gpu_emulated" if emulated else "gpu")
        self._emulated = emulated
        self._task = json.dumps({"shapes": list(shapes), "emulated": emulated})
        self._facts = {"question": "minillm on a GPU, float16, random weights, greedy"}
        if emulated:
            self._facts["EMULATED"] = "no GPU: these are not measurements, they only show that everything runs"
        self._facts |= describe(len(os.sched_getaffinity(0)), PACKAGES)
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def part(self, name: str, limit: float) -> str | None:
        """Run a part, and keep its figures. Returns an error in one line, or None."""
        log = self._stem.with_name(f"{self._stem.name}_{name}.log")
        with log.open("w+", encoding="utf-8", errors="replace") as errors:
            ended = self._collect(name, limit, errors)
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or ["it said nothing"]
        if name == "machine" and ended == "":
            self._facts |= {figure.what: figure.note for figure in self.figures}
            self.figures.clear()
        return None if ended == "" else ended or last[0]

    def _collect(self, name: str, limit: float, errors: IO[str]) -> str | None:
        """Read figures until the part ends. Returns "" on success, None if its log ends with the error."""
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("gpu_part.py")), name, self._task],
            stdout=subprocess.PIPE, stderr=errors, text=True, env=self._environment(), start_new_session=True,
        )  # fmt: skip
        stopped = threading.Event()

        def stop() -> None:
            stopped.set()
            os.killpg(process.pid, signal.SIGKILL)  # it may have started processes itself

        timer = threading.Timer(limit, stop)
        timer.start()
        try:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    self.figures.append(Figure(**json.loads(line)))
                    self.write()
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                stop()
                process.wait()
        if stopped.is_set():
            return f"stopped after {limit:.0f} s, its limit"
        return None if code else ""

    def _environment(self) -> dict[str, str]:
        standin = [str(ROOT / "tests" / "cuda_emulator" / "standin")] if self._emulated else []
        paths = [*standin, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}

    def lines(self) -> Iterator[str]:
        """The lines of the report: machine, table, goals."""
        yield from (f"{name}: {fact}" for name, fact in self._facts.items())
        yield f"seconds in all: {self.seconds():.0f}"
        yield ""
        yield from table(self.figures)
        yield ""
        yield "goals, for an H200"
        if self._emulated:
            yield "  emulated: no goal is held against these figures"
        else:
            yield from (f"  {goal}" for goal in goals(self.figures))

    def write(self) -> None:
        """Write the results so far."""
        ceilings = Ceilings.of(self.figures)
        rows = (row(figure, ceilings) for figure in self.figures)
        write_csv(self._stem.with_name(f"{self._stem.name}.csv"), self._facts, HEADER, rows)
        text = "\n".join(self.lines())
        write_result(self._stem.with_name(f"{self._stem.name}.txt"), text + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Test and measure minillm on a GPU.")
    parser.add_argument("--parts", type=_parts, default=tuple(LIMITS), metavar="A,B", help=f"of {', '.join(LIMITS)}")
    parser.add_argument(
        "--shapes",
        type=_names,
        default=SHAPES,
        metavar="A,B",
        help=f"published shapes of any family, as tinyllama-1.1b,llama-3.1-8b (default: {','.join(SHAPES)})",
    )
    parser.add_argument(
        "--budget", type=positive, default=BUDGET, metavar="SECONDS", help=f"for all parts (default: {BUDGET})"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="for CSV, table and logs")
    parser.add_argument(
        "--emulated",
        action="store_true",
        help="without a GPU, on tiny shapes: shows that everything runs, and measures nothing",
    )
    return parser.parse_args(arguments)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _parts(text: str) -> tuple[str, ...]:
    names = _names(text)
    for name in names:
        if name not in LIMITS:
            raise argparse.ArgumentTypeError(f"{name!r} is not known: expected {', '.join(LIMITS)}")
    return tuple(name for name in LIMITS if name in names)


def run(args: argparse.Namespace) -> None:
    """Run the parts and print the report."""
    from minillm.models import published

    for shape in args.shapes:
        if shape not in (known := published()):
            raise BenchmarkError(f"shape {shape!r} is not known: expected some of {', '.join(known)}")
    if args.emulated and args.out.resolve() == RESULTS.resolve():
        raise BenchmarkError("emulated figures are no results: name another folder with --out")
    this = Run(args.out, EMULATED if args.emulated else args.shapes, emulated=args.emulated)
    if error := this.part("machine", limit=60):
        raise BenchmarkError(error)
    for name in args.parts:
        left = args.budget - this.seconds()
        if left < LEAST_SECONDS:
            this.figures.append(Figure(name, "", "", note=f"left out: the budget of {args.budget} s is spent"))
            continue
        say(f"{name}: at most {min(left, LIMITS[name]):.0f} s")
        if error := this.part(name, min(left, LIMITS[name])):
            this.figures.append(Figure(name, "", "", note=f"failed: {error}"))
        this.write()
    this.write()
    print("\n".join(this.lines()))
    print(f"written: {args.out}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    args = parse(arguments)
    try:
        run(args)
    except BenchmarkError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
