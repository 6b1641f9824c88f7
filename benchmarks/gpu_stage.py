"""One stage of `gpu.py`, in a process of its own, so that one that breaks its GPU context does not break the others.

    python gpu_stage.py STAGE TASK

TASK is a `Task` as JSON. Each figure goes to standard output as one line of JSON as soon as it is measured.
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from gpu_figures import TINY, Figure, Sizes

MISSING_BARRIER = 1
"""Values of `Plant` in planted.cu"""
ROOT = Path(__file__).parents[1]
TESTS = "tests/backends/cuda"
ONE_OF_EACH = (
    "embedding_is or norms_are_their or the_order_of_threads or in_any_order_of_threads or store_kv_fills"
    " or copy_positions_is or argmax_is or draws_over_several or numbers_are_those"
    " or a_nan_stays or rows_are_the_dequantised or random_bits"
    " or several_adapters or experts_are_chosen or products_and_sums or its_norm_is_the_formulas"
)
"""Tests that together launch every kernel; with a sanitizer there is no time for more."""
LEAST, LEAST_OF_THE_DEVICE = "no_tokens or no_rows", "every_family and gpt2"
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
    """The task of a stage."""

    shapes: list[str]
    emulated: bool
    dtype: str = "float16"
    """The type of whole models' weights"""

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


def compile_all(task: Task) -> Iterator[Figure]:
    """Every build of the kernels, on all cores, into CuPy's cache on disk: what follows then compiles nothing."""
    began, jobs = time.perf_counter(), _builds(task)
    with get_context("spawn").Pool(min(len(jobs), len(os.sched_getaffinity(0)))) as pool:
        failures = [error for error in pool.imap_unordered(_compile, jobs) if error]
    seconds = time.perf_counter() - began
    note = f"{len(jobs)} builds, {len(failures)} failed"
    yield Figure("compile", "", "kernels", seconds, seconds, note=note)
    for error in failures:
        yield Figure("compile", "", "", note=error)


def _builds(task: Task) -> list[tuple[str, str, dict[str, int], str, bool]]:
    """Module, a kernel of it, constants and storage type of each build in the table of registers for this GPU; where it
    has dependent launches, which the engine then uses, built for them and plainly.
    """
    from minillm.backends.cuda.compiling import CupyLauncher
    from minillm.backends.cuda.dependent import has_dependent_launches

    with (ROOT / TESTS / "budget.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    here = CupyLauncher().architecture
    known = any(use["arch"].startswith(here) for use in table)
    arch = here if known else "90"  # of another GPU: much the same builds
    kernels = {
        (use["module"], use["constants"], use["storage"]): use["kernel"]
        for use in table
        if use["arch"].startswith(arch)
    }
    builds = [
        (module, kernel, {name: int(value) for name, value in map(_halves, constants.split())}, storage, dependent)
        for (module, constants, storage), kernel in kernels.items()
        for dependent in {False, has_dependent_launches(here)}
    ]
    return [build for build in builds if build[0] in ("embed", "glu")][:3] if task.emulated else builds


def _halves(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _compile(build: tuple[str, str, dict[str, int], str, bool]) -> str | None:
    """One build. Returns an error in one line, or None."""
    from minillm.backends.cuda.compiling import CupyLauncher
    from minillm.backends.cuda.kernels import Kernels

    module, kernel, constants, storage, dependent = build
    try:
        Kernels(CupyLauncher(), storage, dependent=dependent).get(module, kernel, **constants)
    except Exception as error:
        return f"{module} {constants} {storage} {dependent=}: {type(error).__name__}: {str(error)[:200]}"
    return None


def device_tests(task: Task) -> Iterator[Figure]:
    """The engine on the GPU itself: streams, graphs, memory; in one process."""
    yield from _tests(task, "device tests", f"{TESTS}/test_gpu.py", LEAST_OF_THE_DEVICE, ["--maxfail", "8"])


def tests(task: Task) -> Iterator[Figure]:
    """All tests of the kernels and the engine on the GPU, except slow ones."""
    parallel = ["-n", str(min(8, len(os.sched_getaffinity(0))))] if find_spec("xdist") and not task.emulated else []
    yield from _tests(task, "tests", TESTS, LEAST, parallel)


def _tests(task: Task, stage: str, where: str, least: str, options: list[str]) -> Iterator[Figure]:
    if not find_spec("pytest"):
        yield Figure(stage, "", "", note="left out: without pytest")
        return
    some = ["-k", least] if task.emulated else []
    yield from _pytest(stage, where, [], [*QUICK, "-m", "not slow and not reference", *some, *options], where)


def sanitizer(tool: str) -> Callable[[Task], Iterator[Figure]]:
    """The stage of one tool of compute-sanitizer."""

    def run(task: Task) -> Iterator[Figure]:
        program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if not program or not find_spec("pytest"):
            missing = "pytest" if program else "compute-sanitizer"
            yield Figure(tool, "", "", note=f"left out: without {missing}")
            return
        arguments = [*QUICK, "-m", "not slow and not reference", "-k", LEAST if task.emulated else ONE_OF_EACH]
        prefix = [program, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20"]
        yield from _pytest(tool, "one test of each kernel", prefix, arguments, TESTS)

    return run


def _pytest(stage: str, what: str, prefix: list[str], arguments: list[str], where: str) -> Iterator[Figure]:
    """One run of pytest: its result, and a line for each failure and each reason to skip."""
    command = [*prefix, sys.executable, "-m", "pytest", *arguments, where]
    environment = os.environ | {"MINILLM_TEST_GPU": "unpooled" if prefix else "1"}
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:  # written as it comes: a run that is stopped leaves what it has said
        print(line, end="", file=sys.stderr, flush=True)
        said.append(line)
    code, output, seconds = process.wait(), "".join(said), time.perf_counter() - began
    counts = SUMMARY.findall(output)
    words = [
        counts[-1] if counts else f"pytest ended with {code}",
        *FOUND.findall(output),
    ]
    yield Figure(stage, "", what, seconds, seconds, note="; ".join(words))
    for line in output.splitlines():
        if line.startswith(("FAILED ", "ERROR ", "SKIPPED ")):
            yield Figure(stage, "", "", note=line[:300])


def _ceilings(task: Task) -> Iterator[Figure]:
    from gpu_kernels import ceilings

    return ceilings(task.sizes)


def _kernels(task: Task) -> Iterator[Figure]:
    from gpu_kernels import kernels

    return kernels(task.sizes, task.shapes)


def _verify(task: Task) -> Iterator[Figure]:
    from gpu_verify import verify

    return verify(task.sizes, task.shapes)


def _engine(task: Task) -> Iterator[Figure]:
    from gpu_engine import engine

    return engine(task.sizes, task.shapes, task.dtype)


def _dependent(task: Task) -> Iterator[Figure]:
    from gpu_engine import dependent

    return dependent(task.sizes, task.shapes, task.dtype, emulated=task.emulated)


def _carveouts(task: Task) -> Iterator[Figure]:
    from gpu_engine import carveouts

    return carveouts(task.sizes, task.shapes, task.dtype)


def _prompts(task: Task) -> Iterator[Figure]:
    from gpu_prompts import prompts

    return prompts(task.sizes, task.shapes, task.dtype)


def _torch(task: Task) -> Iterator[Figure]:
    from gpu_torch import torch_peers

    return torch_peers(task.sizes, task.shapes, emulated=task.emulated)


def _ranks(task: Task) -> Iterator[Figure]:
    from gpu_ranks import ranks

    return ranks(emulated=task.emulated)


def planted(task: Task) -> Iterator[Figure]:
    """Whether racecheck finds a race that is there: else that it finds none says nothing."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not program:
        yield Figure("planted", "", "", note="left out: without compute-sanitizer")
        return
    command = [program, "--tool", "racecheck", "--error-exitcode", "86", sys.executable, __file__, "race", sys.argv[2]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    print(done.stdout, file=sys.stderr)
    verdict = "found, as it should be" if done.returncode == 86 else f"NOT FOUND: exit code {done.returncode}"
    yield Figure("planted", "", "a race that racecheck has to find", note=verdict)


def race(task: Task) -> Iterator[Figure]:
    """Run a kernel whose warps read what others may not have written yet."""
    import numpy as np

    from minillm.backends.cuda.compiling import CupyLauncher

    launcher = CupyLauncher()
    import cupy

    source = ROOT / TESTS / "planted.cu"
    kernel = launcher.module(source, ("-DMINILLM_STORAGE=32",)).get_function("reverse_twice")
    x, out = cupy.asarray(np.arange(256, dtype=np.float32)), cupy.zeros(256, np.float32)
    kernel((1,), (256,), (out, x, np.int32(MISSING_BARRIER)))
    cupy.asnumpy(out)
    yield Figure("race", "", "ran")


def _transformers(task: Task) -> Iterator[Figure]:
    from gpu_peer import transformers

    return transformers(task.sizes, task.shapes, emulated=task.emulated)


def _host(task: Task) -> Iterator[Figure]:
    from gpu_profile import host

    return host(emulated=task.emulated)


def _launches(task: Task) -> Iterator[Figure]:
    from gpu_profile import launches

    return launches(task.sizes, task.shapes)


STAGES: dict[str, Callable[[Task], Iterator[Figure]]] = {
    "machine": machine,
    "compile": compile_all,
    "device tests": device_tests,
    "tests": tests,
    "host": _host,
    "launches": _launches,
    "ceilings": _ceilings,
    "kernels": _kernels,
    "verify": _verify,
    "engine": _engine,
    "transformers": _transformers,
    "torch": _torch,
    "ranks": _ranks,
    "planted": planted,
    "race": race,
    "dependent": _dependent,
    "carve-out": _carveouts,
    "prompts": _prompts,
    **{tool: sanitizer(tool) for tool in ("memcheck", "racecheck", "synccheck", "initcheck")},
}


def main() -> int:
    """See the module's docstring. Returns the exit code: 0, or 1 with one line for an error of minillm's."""
    from minillm.errors import MinillmError
    from minillm.models import published

    stage, task = sys.argv[1], Task(**json.loads(sys.argv[2]))
    if task.emulated:
        for name in task.shapes:
            published()[name] = EMULATED_SHAPES[name]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    try:
        for figure in STAGES[stage](task):
            print(json.dumps(figure._asdict()), file=replies, flush=True)
    except MinillmError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
