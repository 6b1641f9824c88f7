"""Is minillm right on a GPU, and how fast is it? For a machine with one GPU and no network.

    python benchmarks/gpu.py --out FOLDER

Parts A to D, together less than 15 minutes on an H100 or H200, on models that people run:

    A          the engine on the GPU, every kernel against float32 at real sizes, synccheck, initcheck and a planted
               race; ceilings; decode steps and prompts of whole models
    B          steps whose kernels begin before those before them have ended against plain ones, bit by bit; each kernel
    C          a compiled loop, torch.mm, SDPA and PyTorch's product of 4 bits in graphs; transformers
    D          two ranks on one GPU, over NCCL

Five other parts, one or several at a time, each of less than 10 minutes:

    correct    compiles all kernels on all cores; the engine's and the kernels' tests on the GPU
    profile    the host's share of a step; each kernel of a step and of a prompt, by ncu or by events
    speed      ceilings; decode steps and prompts of whole models; each kernel alone; transformers on the same GPU
    dependent  decode steps whose kernels begin before those before them have ended, and plain ones
    sanitize   memcheck, racecheck, synccheck and initcheck of the kernels

A part runs in stages, each a process of its own with a time limit. One that fails or runs out of time is reported in
the table; the others run all the same. Table, CSV and logs of a part are one archive, FOLDER/gpu_PART.tar.gz, which is
written anew after each stage: whenever the part is stopped, what it has found is there.
"""

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]  # minillm need not be installed

from gpu_figures import HEADER, Ceilings, Figure, goals, row, table  # noqa: E402
from harness import RESULTS, BenchmarkError, describe, make_folder, positive, say, write_csv, write_result  # noqa: E402

PARTS = {
    "A": {
        "compile": 100,
        "verify": 50,
        "device tests": 60,
        "planted": 15,
        "synccheck": 30,
        "initcheck": 30,
        "ceilings": 15,
        "engine": 100,
    },
    "B": {"dependent": 100, "kernels": 70, "prompts": 40},
    "C": {"torch": 200, "transformers": 30},
    "D": {"ranks": 50},
    "correct": {"compile": 120, "device tests": 150, "tests": 260},
    "profile": {"compile": 120, "host": 60, "launches": 370},
    "speed": {"compile": 120, "ceilings": 25, "engine": 190, "kernels": 110, "transformers": 95},
    "dependent": {"compile": 120, "dependent": 280, "carve-out": 150},
    "sanitize": {"memcheck": 135, "racecheck": 135, "synccheck": 135, "initcheck": 135},
}
"""Part -> its stages -> seconds that each may take."""
QUARTER = ("A", "B", "C", "D")
"""Parts that together fit into 15 minutes, most important first: is it right, and how fast; one way against another;
peers; several ranks"""
BUDGET = 560
"""Seconds of a part: with its start, less than 10 minutes"""
SHAPES = ("opt-125m", "opt-1.3b", "opt-6.7b", "opt-13b")
"""Shapes that the other parts are for. Others are given by name: --shapes tinyllama-1.1b,llama-3.1-8b"""
MODELS = ("llama-3.2-1b", "qwen3-1.7b", "llama-3.1-8b", "qwen2.5-1.5b")
"""Shapes of parts A to D, which people run, in bfloat16 as they are published"""
EMULATED = ("emulated-llama", "emulated")
"""Tiny shapes for --emulated, with each kind of layer (`gpu_stage.EMULATED_SHAPES`)."""
EMULATED_SLOWER = 10
"""Times the seconds of a stage, which are meant for a GPU"""
LEAST_SECONDS = 5
PACKAGES = ("minillm", "numpy", "cupy-cuda13x", "cupy-cuda12x", "ml_dtypes", "torch", "transformers", "pytest")


class Run:
    """The stages of one part that ran so far, and where their results go."""

    def __init__(self, part: str, out: Path, folder: Path, shapes: Sequence[str], *, emulated: bool) -> None:
        """`out` gets the archive, `folder` the files that are put into it."""
        make_folder(out)
        self.figures: list[Figure] = []
        name = f"gpu_{part}_emulated" if emulated else f"gpu_{part}"
        self.archive = out / f"{name}.tar.gz"
        self._stem = folder / name
        self._emulated = emulated
        dtype = "float16" if emulated or part not in QUARTER else "bfloat16"
        self._task = json.dumps({"shapes": list(shapes), "emulated": emulated, "dtype": dtype})
        self._facts = {"question": f"minillm on a GPU, {part}; {dtype}, random weights"}
        if emulated:
            self._facts["EMULATED"] = "no GPU: these are not measurements, they only show that everything runs"
        self._facts |= describe(len(os.sched_getaffinity(0)), PACKAGES)
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def stage(self, name: str, limit: float) -> str | None:
        """Run a stage, and keep its figures. Returns an error in one line, or None."""
        log = self._stem.with_name(f"{self._stem.name}_{name.replace(' ', '_')}.log")
        with log.open("w+", encoding="utf-8", errors="replace") as errors:
            try:
                ended = self._collect(name, limit, errors)
            except Exception as error:  # such as a reply that is none: the other stages run all the same
                ended = f"{type(error).__name__}: {str(error)[:200]}"
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or ["it said nothing"]
        if name == "machine" and ended == "":
            self._facts |= {figure.what: figure.note for figure in self.figures}
            self.figures.clear()
        return None if ended == "" else ended or last[0]

    def _collect(self, name: str, limit: float, errors: IO[str]) -> str | None:
        """Read figures until the stage ends. Returns "" on success, None if its log ends with the error."""
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("gpu_stage.py")), name, self._task],
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
        standin = [str(ROOT / "tests" / "cupy_standin")] if self._emulated else []
        paths = [*standin, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}

    def lines(self) -> Iterator[str]:
        """The lines of the report: machine, table, goals."""
        yield from (f"{name}: {fact}" for name, fact in self._facts.items())
        yield f"seconds in all: {self.seconds():.0f}"
        yield ""
        yield from table(self.figures, self._facts.get("gpu", ""))
        yield ""
        yield "goals, for an H100"
        if self._emulated:
            yield "  emulated: no goal is held against these figures"
        else:
            yield from (f"  {goal}" for goal in goals(self.figures))

    def write(self) -> None:
        """Write the results so far."""
        ceilings = Ceilings.of(self.figures, self._facts.get("gpu", ""))
        rows = (row(figure, ceilings) for figure in self.figures)
        write_csv(self._stem.with_name(f"{self._stem.name}.csv"), self._facts, HEADER, rows)
        text = "\n".join(self.lines())
        write_result(self._stem.with_name(f"{self._stem.name}.txt"), text + "\n")

    def pack(self) -> None:
        """Write the archive: table, CSV and logs so far."""
        self.write()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for path in sorted(self._stem.parent.iterdir()):
                archive.add(path, path.name)
        write_result(self.archive, packed.getvalue())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Test and measure minillm on a GPU.", allow_abbrev=False)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: {' '.join(QUARTER)})"
    )
    parser.add_argument(
        "--shapes",
        type=_names,
        metavar="A,B",
        help=f"published shapes of any family (default: {','.join(MODELS)}; of other parts {','.join(SHAPES)})",
    )
    parser.add_argument("--stages", type=_names, metavar="A,B", help="only these stages of the parts")
    parser.add_argument(
        "--budget", type=positive, default=BUDGET, metavar="SECONDS", help=f"for each part (default: {BUDGET})"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the archive of each part")
    parser.add_argument(
        "--emulated",
        action="store_true",
        help="without a GPU, on tiny shapes: shows that everything runs, and measures nothing",
    )
    return parser.parse_args(arguments)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def check(args: argparse.Namespace) -> None:
    """Check names.

    Raises:
        BenchmarkError: one is not known.
    """
    from minillm.models import published

    stages = dict.fromkeys(stage for part in PARTS.values() for stage in part)
    for kind, names, known in (
        ("part", args.parts, PARTS),
        ("stage", args.stages or (), stages),
        ("shape", args.shapes or (), published()),
    ):
        for name in names:
            if name not in known:
                raise BenchmarkError(f"{kind} {name!r} is not known: expected some of {', '.join(known)}")
    if args.emulated and args.out.resolve() == RESULTS.resolve():
        raise BenchmarkError("emulated figures are no results: name another folder with --out")


def run(part: str, args: argparse.Namespace, folder: Path) -> None:
    """Run a part, and print its report.

    Raises:
        BenchmarkError: there is no GPU.
    """
    usual = MODELS if part in QUARTER else SHAPES
    this = Run(part, args.out, folder, EMULATED if args.emulated else args.shapes or usual, emulated=args.emulated)
    if error := this.stage("machine", limit=60):
        raise BenchmarkError(error)
    parts = args.parts or QUARTER
    if part == parts[0]:
        say(plan(parts, args.budget))
    try:
        for name, limit in PARTS[part].items():
            if args.stages and name not in args.stages:
                continue
            left = args.budget - this.seconds()
            if left < LEAST_SECONDS:
                this.figures.append(Figure(name, "", "", note=f"left out: the budget of {args.budget} s is spent"))
                continue
            limit = min(left, limit * (EMULATED_SLOWER if args.emulated else 1))
            say(f"{name}: at most {limit:.0f} s")
            if error := this.stage(name, limit):
                this.figures.append(Figure(name, "", "", note=f"failed: {error}"))
            this.pack()
    finally:
        this.pack()
    print("\n".join(this.lines()))
    print(f"written: {this.archive}")


def plan(parts: Sequence[str], budget: int) -> str:
    """The most seconds that parts may take, in one line."""
    most = {part: min(budget, sum(PARTS[part].values())) for part in parts}
    return "at most " + ", ".join(f"{part} {seconds} s" for part, seconds in most.items()) + f": {sum(most.values())} s"


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # what was written is packed on the way out


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    args = parse(arguments)
    try:
        check(args)
        before = signal.signal(signal.SIGTERM, _stop)
        try:
            for part in args.parts or QUARTER:
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        run(part, args, Path(folder))
                    except BenchmarkError:
                        raise
                    except Exception as error:  # the parts after it run all the same
                        print(f"gpu: part {part} ended: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            signal.signal(signal.SIGTERM, before)
    except BenchmarkError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
