"""One part of `gpu.py`, in a process of its own, so that a part that breaks its GPU context does not break the others.

    python gpu_part.py PART TASK

TASK is a `Task` as JSON. Each figure goes to standard output as one line of JSON as soon as it is measured.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from gpu_figures import TINY, Figure, Sizes

ROOT = Path(__file__).parents[1]
TESTS = "tests/backends/cuda"
ONE_OF_EACH = (
    "embedding_is or norms_are_their or the_order_of_threads or in_any_order_of_threads or store_kv_fills"
    " or copy_positions_is or argmax_is or draws_over_several or numbers_are_those"
)
"""Tests that together launch every kernel; with a sanitizer there is no time for more."""
LEAST = "no_tokens or no_rows"
"""Tests for --emulated, which only shows that everything runs"""
QUICK = ("-p", "no:cacheprovider", "-o", "addopts=", "-W", "default", "-q", "-rfs", "--tb=short")
SUMMARY = re.compile(r"^=*\s*(?P<counts>\d+ (?:passed|failed|skipped|error|deselected).*?) in [\d.]+s", re.MULTILINE)
FOUND = re.compile(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)")
_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
EMULATED_SHAPES: dict[str, dict[str, Any]] = {
    "emulated-llama": {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 40, **_SIZES},
    "emulated": {"model_type": "opt", "ffn_dim": 64, **_SIZES},
}


class Task(NamedTuple):
    """The task of a part."""

    shapes: list[str]
    emulated: bool

    @property
    def sizes(self) -> Sizes:
        """The sizes to measure."""
        return TINY if self.emulated else Sizes()


def machine(task: Task) -> Iterator[Figure]:
    """Name, memory and versions of the GPU, as notes; fails without one."""
    from minillm.backends.cuda.compiling import CupyLauncher
    from minillm.backends.cuda.kernels import sources_digest

    CupyLauncher()
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    memory = f"{properties['totalGlobalMem'] / 2**30:.1f} GiB"
    yield Figure("machine", "", "gpu", note=f"{properties['name'].decode()}, {memory}")
    versions = f"CuPy {cupy.__version__}, CUDA {runtime.runtimeGetVersion()}, driver for {runtime.driverGetVersion()}"
    yield Figure("machine", "", "cuda", note=versions)
    yield Figure("machine", "", "kernels", note=f"sources {sources_digest()}")


def tests(task: Task) -> Iterator[Figure]:
    """All tests of the kernels and the engine on the GPU, except slow ones."""
    if not find_spec("pytest"):
        yield Figure("tests", "", "", note="left out: without pytest")
        return
    arguments = [*QUICK, "-m", "not slow and not reference"]
    if task.emulated:
        arguments += ["-k", LEAST]
    elif find_spec("xdist"):
        arguments += ["-n", str(min(8, len(os.sched_getaffinity(0))))]
    yield from _pytest("tests", "kernels and engine", [], arguments)


def sanitizer(task: Task) -> Iterator[Figure]:
    """Memory errors and races in shared memory, by compute-sanitizer."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not program or not find_spec("pytest"):
        yield Figure("sanitizer", "", "", note=f"left out: without {'pytest' if program else 'compute-sanitizer'}")
        return
    arguments = [*QUICK, "-m", "not slow and not reference", "-k", LEAST if task.emulated else ONE_OF_EACH]
    for tool in ("memcheck", "racecheck"):
        prefix = [program, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20"]
        yield from _pytest("sanitizer", tool, prefix, arguments)


def _pytest(part: str, what: str, prefix: list[str], arguments: list[str]) -> Iterator[Figure]:
    """One run of pytest: its result, and a line for each failure and each reason to skip."""
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


def _ceilings(task: Task) -> Iterator[Figure]:
    from gpu_kernels import ceilings

    return ceilings(task.sizes)


def _kernels(task: Task) -> Iterator[Figure]:
    from gpu_kernels import kernels

    return kernels(task.sizes, task.shapes)


def _engine(task: Task) -> Iterator[Figure]:
    from gpu_engine import engine

    return engine(task.sizes, task.shapes)


def _transformers(task: Task) -> Iterator[Figure]:
    from gpu_peer import transformers

    return transformers(task.sizes, task.shapes, emulated=task.emulated)


PARTS: dict[str, Callable[[Task], Iterator[Figure]]] = {
    "machine": machine,
    "tests": tests,
    "ceilings": _ceilings,
    "kernels": _kernels,
    "engine": _engine,
    "transformers": _transformers,
    "sanitizer": sanitizer,
}


def main() -> int:
    """See the module's docstring. Returns the exit code: 0, or 1 with one line for an error of minillm's."""
    from minillm.errors import MinillmError
    from minillm.models import published

    part, task = sys.argv[1], Task(**json.loads(sys.argv[2]))
    if task.emulated:
        for name in task.shapes:
            published()[name] = EMULATED_SHAPES[name]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    try:
        for figure in PARTS[part](task):
            print(json.dumps(figure._asdict()), file=replies, flush=True)
    except MinillmError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
