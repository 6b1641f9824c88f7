"""Shared by all benchmarks: arguments, threads, result files, and a record of the machine."""

import argparse
import csv
import io
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
if not RESULTS.is_dir():  # installed, without a checkout
    RESULTS = Path("results")

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class BenchmarkError(Exception):
    """An error that the user can correct, in one line; the script exits with 2."""


def new_parser(description: str, results: str) -> argparse.ArgumentParser:
    """A parser of options, with those for threads and for the folder of the results, such as "CSV and the plot"."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--threads", type=positive, default=available_cores(), metavar="N", help="default: all cores")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"for the {results}")
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """Comma-separated whole numbers of at least 1, for argparse: sorted, without duplicates."""
    return tuple(sorted({positive(part.strip()) for part in text.split(",")}))


def need_matplotlib() -> None:
    """Check for matplotlib before anything is measured.

    Raises:
        BenchmarkError: matplotlib is not installed.
    """
    from minillm.errors import install

    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise BenchmarkError(f"drawing needs matplotlib: {install('plot')}") from None


def execute(name: str, run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a script on `args.threads` threads. Returns its exit code; 2 for invalid arguments, 130 for Ctrl-C."""
    os.environ.update(thread_environment(args.threads))  # before anything imports NumPy
    from minillm.cli.startup import tune_blas
    from minillm.errors import MinillmError

    tune_blas()
    try:
        return run(args)
    except (MinillmError, BenchmarkError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def token_ids(number: int, length: int, vocab_size: int) -> list[int]:
    """A prompt of ids that differ from prompt to prompt and avoid the special ones."""
    return [4 + (7919 * i + 104_729 * number) % (vocab_size - 4) for i in range(length)]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and greatest."""
    return statistics.median(values), min(values), max(values)


def make_folder(path: Path) -> None:
    """Make the folder for results.

    Raises:
        BenchmarkError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchmarkError(f"--out {path} cannot be made: {error.strerror}") from None


def say(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def write_csv(path: Path, facts: dict[str, str], header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table as CSV, after comments with the facts about the run.

    Raises:
        BenchmarkError: the file cannot be written.
    """
    text = io.StringIO(newline="")
    text.writelines(f"# {name}: {fact}\n" for name, fact in facts.items())
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_result(path, text.getvalue())


def write_figure(path: Path, figure: Any) -> None:
    """Write a matplotlib figure as PNG.

    Raises:
        BenchmarkError: the file cannot be written.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=140)
    write_result(path, drawn.getvalue())


def write_result(path: Path, content: str | bytes) -> None:
    """Write a file of results, completely or not at all.

    Raises:
        BenchmarkError: it cannot be written.
    """
    from minillm.errors import UsageError
    from minillm.output_files import write_file

    try:
        write_file(path, content)
    except UsageError as error:
        raise BenchmarkError(str(error)) from None


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables for a BLAS's number of threads; read when NumPy is imported."""
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


def bandwidth_probe(threads: int) -> Callable[[], float]:
    """A function that measures the memory bandwidth in GB/s: the best of three dot products of two arrays of 128 MB
    for each thread, which reads faster from two places at once than from one.
    """
    import numpy as np

    parts = np.ones((threads, 2, 32 << 20), np.float32)
    pool = ThreadPoolExecutor(threads)

    def read() -> float:
        began = time.perf_counter()
        list(pool.map(lambda part: np.dot(*part), parts))
        return time.perf_counter() - began

    def probe() -> float:
        return parts.nbytes / min(read() for _ in range(3)) / 1e9

    probe()  # warm-up: starts threads, maps pages
    return probe


def describe(threads: int, packages: tuple[str, ...] = ("minillm", "numpy")) -> dict[str, str]:
    """Processor, system, versions, compiler and commit, each a short text.

    Args:
        threads: how many the benchmark used
        packages: distributions whose versions matter; "not installed" for absent ones
    """
    return {
        "cpu": _cpu(),
        "cores": f"{available_cores()} available; threads used: {threads}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version(name)}" for name in packages),
        "blas": _blas(),
        "compiler": _compiler(),
        "commit": _commit(),
    }


def headed(facts: dict[str, str]) -> list[str]:
    """The facts about a run as the first lines of a report."""
    return [*(f"{name}: {fact}" for name, fact in facts.items()), ""]


def version(package: str) -> str:
    """The installed version of a distribution, or "not installed"."""
    if package == "minillm":
        import minillm

        return minillm.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def has_avx512() -> bool:
    """True if the processor has AVX-512."""
    return "avx512f" in _cpu_fields().get("flags", "")


def _cpu() -> str:
    """The processor's model name, and whether it has AVX-512."""
    fields = _cpu_fields()
    parts = [fields.get("model name", platform.processor() or platform.machine())]
    if "cpu family" in fields:  # more precise than a name like "AMD EPYC"
        parts.append(f"family {fields['cpu family']} model {fields['model']}")
    return ", ".join([*parts, "AVX-512" if has_avx512() else "no AVX-512"])


def _cpu_fields() -> dict[str, str]:
    """The fields of the last core in /proc/cpuinfo; empty if there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _blas() -> str:
    """The BLAS that NumPy was built with, and its environment variables."""
    import numpy as np

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    told = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("OPENBLAS_") and name not in THREAD_VARIABLES
    )
    return " ".join([f"{blas['name']} {blas['version']}", *told])


def _compiler() -> str:
    """The C compiler of the CPU kernels: the first line of its version."""
    from minillm.backends.cpu.compiling import compilers
    from minillm.errors import DeviceError

    try:
        found = compilers()
        if not found:
            return "none"
        compiler = found[0]
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True)
    except (DeviceError, OSError, subprocess.CalledProcessError) as error:
        return f"unknown: {error}"
    return next(iter(done.stdout.splitlines()), "unknown")


def _commit() -> str:
    """The commit of the checkout, and whether files were changed since."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        sources = ("../minillm", "../kernels", "../benchmarks/*.py")
        changed = subprocess.run([*git, "status", "--porcelain", "--", *sources], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" with changes" if changed.stdout.strip() else "")
