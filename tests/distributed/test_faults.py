"""Whatever happens to a rank, and whenever: all ranks end, and the cause is said once."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ..tiny import write_checkpoint
from .processes import assert_none_is_left, ended, ranks_of, started, under_mpi

pytest.importorskip("mpi4py")
pytestmark = under_mpi

PROGRAM = """
import os, sys, time
from minillm import Engine
from minillm.engine import loading
from minillm.cli.main import run
from minillm.distributed.runner import RankRunner
from minillm.parallel import Parallel

def here(phase):  # what is to happen there, on this rank
    if phase == "{phase}" and int(os.environ["PMI_RANK"]) == {rank}:
        print("here", flush=True)
        {event}

load_model, compute = loading.load_model, RankRunner.compute

def load(*arguments, **options):
    here("load")
    return load_model(*arguments, **options)

def compute_part(self, backend, parts, views=()):
    here("prefill" if parts[0].batch.num_tokens > 1 else "decode")
    return compute(self, backend, parts, views)

loading.load_model, RankRunner.compute = load, compute_part
sys.exit(run(["generate", "A list of colors: red,", "-n", "400", "--backend", "numpy", "--threads", "1",
              "--tensor-parallel", "{tensor}", "--pipeline-parallel", "{pipeline}"]))
"""

WAITS = "time.sleep(600)"
GOES_ON = "time.sleep(1)"
FAILS = "raise MemoryError('no memory for this')"
PHASES = ["load", "prefill", "decode"]


def ranks_at(phase: str, rank: int, event: str, tensor: int, pipeline: int) -> "subprocess.Popen[str]":
    """Ranks that generate, one of which has reached a phase, where an event awaits it."""
    code = PROGRAM.format(phase=phase, rank=rank, event=event, tensor=tensor, pipeline=pipeline)
    process = started(tensor * pipeline, code=code)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "here" in line, process.communicate()
    return process


SHARED = [(rank, 2, 1) for rank in range(2)] + [(rank, 1, 2) for rank in range(2)]
PLACES = [(phase, *place) for phase in PHASES for place in [*SHARED, (3, 2, 2)] if phase != "prefill" or place[0] == 1]


def cases(cases: Sequence[Any], *often: Any) -> list[Any]:
    """Cases of which some run every time; the others are exhaustive."""
    assert set(often) <= set(cases)
    return [pytest.param(*case, marks=() if case in often else pytest.mark.exhaustive) for case in cases]


KILLED = [("load", 3, 2, 2), ("prefill", 1, 2, 1), ("decode", 0, 1, 2), ("decode", 1, 2, 1)]
FAILING = [("load", 1, 2, 1), ("prefill", 1, 1, 2), ("decode", 0, 2, 1), ("decode", 1, 1, 2)]
STOPPED = [
    ("load", GOES_ON, 0),
    ("decode", GOES_ON, 0.5),
    ("prefill", WAITS, 0),
    ("decode", WAITS, 0.5),
]


@pytest.mark.parametrize(("phase", "rank", "tensor", "pipeline"), cases(PLACES, *KILLED))
def test_a_rank_that_is_killed_ends_all(phase: str, rank: int, tensor: int, pipeline: int) -> None:
    process = ranks_at(phase, rank, WAITS, tensor, pipeline)
    pids = ranks_of(process)
    assert len(pids) == tensor * pipeline
    os.kill(pids[rank], signal.SIGKILL)
    code, err = ended(process)
    assert code != 0 and "Traceback" not in err
    assert_none_is_left(pids)


@pytest.mark.parametrize(
    ("phase", "rank", "tensor", "pipeline"), cases([place for place in PLACES if place[1] < 2], *FAILING)
)
def test_an_exception_on_a_rank_ends_all(phase: str, rank: int, tensor: int, pipeline: int) -> None:
    code, err = ended(ranks_at(phase, rank, FAILS, tensor, pipeline))
    assert code == 1 and "Traceback" not in err
    [line] = [line for line in err.splitlines() if line.startswith("minillm: ")]
    assert line == f"minillm: rank {rank}: MemoryError: no memory for this"


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize(
    ("phase", "event", "seconds"), cases(list(product(PHASES, (GOES_ON, WAITS), (0, 0.5))), *STOPPED)
)
def test_ctrl_c_ends_all(phase: str, event: str, seconds: float) -> None:
    """At once, or while rank 0 waits.

    Of a rank that hangs the second one, as mpiexec says, whose exit code then is its own: MPICH's is 255 or 0.
    """
    process = ranks_at(phase, 1, event, 2, 1)
    pids = ranks_of(process)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    if event == WAITS:
        time.sleep(1)
        process.send_signal(signal.SIGINT)
    code, err = ended(process)
    assert (code != 0 or event == WAITS) and "Traceback" not in err
    assert_none_is_left(pids)


def test_what_all_ranks_find_is_said_once() -> None:
    code, err = ended(started(2, "generate", "A", "--tensor-parallel", 4))
    assert code != 0 and err.count("minillm: ") == 1
    assert "needs 4 processes, found 2: start them with mpiexec -n 4" in err
    code, err = ended(started(4, "generate", "A", "--tensor-parallel", 4))
    assert code != 0 and err.count("minillm: ") == 1
    assert "tensor_parallel 4 should divide the model's num_heads 6" in err


def test_a_rank_without_mpi_says_so() -> None:
    program = """
import sys
sys.modules["mpi4py"] = None  # as if it were not installed
from minillm.cli.main import run
sys.exit(run(["generate", "A", "--tensor-parallel", "2"]))
"""
    code, err = ended(started(2, code=program))
    assert code == 1 and "Traceback" not in err and "several processes need MPI" in err


def test_a_checkpoint_that_differs_on_a_rank_is_named(tmp_path: Path) -> None:
    for seed in range(2):
        write_checkpoint(tmp_path / str(seed), seed=seed)
    program = f"""
import os, sys
from minillm.cli.main import run
sys.exit(run(["generate", "A", "-m", {str(tmp_path)!r} + "/" + os.environ["PMI_RANK"], "--tensor-parallel", "2"]))
"""
    code, err = ended(started(2, code=program))
    assert code != 0 and err.count("minillm: ") == 1 and "rank 1 has the checkpoint" in err
