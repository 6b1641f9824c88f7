"""The kernels' tests on the GPU, plain and under compute-sanitizer, for `gpu.py`."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from gpu_figures import Figure

ROOT = Path(__file__).parents[1]
TESTS = "tests/backends/cuda"
ONE_OF_EACH = (
    "embedding_is or norms_are_their or the_order_of_threads or in_any_order_of_threads or store_kv_fills"
    " or copy_positions_is or argmax_is or draws_over_several or numbers_are_those"
)
"""Tests that between them launch every kernel; a sanitizer has no time for more."""
LEAST = "no_tokens or no_rows"
"""For a run without a GPU, which only shows that everything runs."""
QUICK = ("-p", "no:cacheprovider", "-o", "addopts=", "-W", "default", "-q", "-rfs", "--tb=short")
SUMMARY = re.compile(r"^=*\s*(?P<counts>\d+ (?:passed|failed|skipped|error|deselected).*?) in [\d.]+s", re.MULTILINE)
FOUND = re.compile(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)")


def tests(*, emulated: bool) -> Iterator[Figure]:
    """All tests of the kernels and the engine on the GPU, but the slow ones."""
    if not find_spec("pytest"):
        yield Figure("tests", "", "", note="left out: without pytest")
        return
    arguments = [*QUICK, "-m", "not slow and not reference"]
    if emulated:
        arguments += ["-k", LEAST]
    elif find_spec("xdist"):
        arguments += ["-n", str(min(8, len(os.sched_getaffinity(0))))]
    yield from _pytest("tests", "kernels and engine", [], arguments)


def sanitizer(*, emulated: bool) -> Iterator[Figure]:
    """Memory errors, and races on shared memory."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not program or not find_spec("pytest"):
        yield Figure("sanitizer", "", "", note=f"left out: without {'pytest' if program else 'compute-sanitizer'}")
        return
    arguments = [*QUICK, "-m", "not slow and not reference", "-k", LEAST if emulated else ONE_OF_EACH]
    for tool in ("memcheck", "racecheck"):
        prefix = [program, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20"]
        yield from _pytest("sanitizer", tool, prefix, arguments)


def _pytest(part: str, what: str, prefix: list[str], arguments: list[str]) -> Iterator[Figure]:
    """One run: how it ended, and a line for each failure and each reason to skip."""
    command = [*prefix, sys.executable, "-m", "pytest", *arguments, TESTS]
    environment = os.environ | {"MINILLM_TEST_GPU": "unpooled" if prefix else "1"}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace")
    seconds = time.perf_counter() - began
    print(done.stdout, done.stderr, file=sys.stderr, flush=True)
    counts = SUMMARY.findall(done.stdout)
    words = [
        counts[-1] if counts else f"pytest ended with {done.returncode}",
        *FOUND.findall(done.stdout + done.stderr),
    ]
    yield Figure(part, "", what, seconds, seconds, note="; ".join(words))
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ", "SKIPPED ")):
            yield Figure(part, "", "", note=line[:300])
