"""One process or several ranks for `ranks.py`: `Side` in the parent, `main` in each rank.

    python rank_process.py SHAPE DTYPE TENSOR PIPELINE THREADS      a model, kept loaded, measured on request
    python rank_process.py links                                    messages alone, between all ranks

Messages to rank 0 and its replies are JSON, one a line:

    {"do": "decode", "batch", "prompt", "steps"}   -> {"seconds": [...], "cpu": [...]}, of each step; CPU of rank 0
    {"do": "prefill", "prompt", "micro_batches"}   -> {"seconds", "cpu", "busy"}; busy: rank 0's own stage
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness import BenchmarkError, available_cores, thread_environment, token_ids

if TYPE_CHECKING:
    from minillm import Engine

SIZES = tuple(1 << k for k in range(10, 25, 2))
"""Bytes of the messages that are timed"""
ROUNDS = 7
ROUND_SECONDS = 0.05
"""Of calls of one size, about: with more ranks than cores a message waits until the scheduler turns to its reader"""


class Side:
    """A model on one process or on several ranks, each of which is kept on a core of its own."""

    def __init__(self, name: str, shape: str, dtype: str, tensor: int, pipeline: int, threads: int) -> None:
        """Start it; `ask` waits until it has loaded."""
        self.name, self.tensor, self.pipeline, self.threads = name, tensor, pipeline, threads
        words = [shape, dtype, tensor, pipeline, threads]
        self._process = subprocess.Popen(
            [*launcher(tensor * pipeline), sys.executable, __file__, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | thread_environment(threads) | {"HYDRA_LAUNCHER": "fork"},
        )

    def ask(self, **message: Any) -> Any:
        """Send a message. Returns the reply.

        Raises:
            BenchmarkError: the process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            raise BenchmarkError(f"{self.name} ended, with exit code {self._process.wait()}: see above")
        return json.loads(reply)

    def close(self) -> None:
        """Let it end."""
        with self._process:  # its standard input is closed
            pass


def launcher(ranks: int) -> list[str]:
    """The beginning of a command for so many ranks."""
    import shutil

    if ranks == 1:
        return []
    beside = os.path.dirname(sys.executable)  # noqa: PTH120  # of the link, not of what it leads to
    found = shutil.which("mpiexec") or shutil.which("mpiexec", path=beside)
    if found is None:
        raise BenchmarkError("there is no mpiexec: pip install -e '.[mpi]'")
    return [found, "-n", str(ranks)]


def measured_links(ranks: int) -> dict[str, Any]:
    """Seconds of messages between ranks of this machine: "all_reduce" and "one_way", by their bytes."""
    command = [*launcher(ranks), sys.executable, __file__, "links"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | thread_environment(1) | {"HYDRA_LAUNCHER": "fork"}
    )
    if done.returncode:
        raise BenchmarkError(f"the probe of messages ended with exit code {done.returncode}: see above")
    found = json.loads(done.stdout)
    return {name: {int(size): seconds for size, seconds in each.items()} for name, each in found.items()}


# --- in each rank ----------------------------------------------------------------------------------------------------


def keep_on_core(rank: int) -> None:
    """Keep this process on one core; with more ranks than cores some share one."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def links() -> None:
    """Time messages between all ranks, and print the medians as JSON on rank 0."""
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    keep_on_core(comm.rank)
    found: dict[str, dict[int, float]] = {"all_reduce": {}, "one_way": {}}
    for size in SIZES:
        x = np.zeros(size // 4, np.float32)

        def exchange(x: Any = x) -> None:  # there and back
            if comm.rank == 0:
                comm.Send(x, dest=1)
                comm.Recv(x, source=1)
            elif comm.rank == 1:
                comm.Recv(x, source=0)
                comm.Send(x, dest=0)

        def reduce(x: Any = x) -> None:
            comm.Allreduce(MPI.IN_PLACE, x)

        found["all_reduce"][size] = _seconds(comm, reduce)
        found["one_way"][size] = _seconds(comm, exchange) / 2
    if comm.rank == 0:
        print(json.dumps(found))


def _seconds(comm: Any, call: Callable[[], None]) -> float:
    """Seconds of one call, the median of some rounds."""
    comm.Barrier()
    began = time.perf_counter()
    for _ in range(3):
        call()
    once = (time.perf_counter() - began) / 3
    repeats: int = comm.bcast(max(3, min(300, int(ROUND_SECONDS / once))))  # as rank 0 says
    rounds: list[float] = []
    for _ in range(ROUNDS):
        comm.Barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        rounds.append((time.perf_counter() - began) / repeats)
    return statistics.median(rounds)


def serve(engine: "Engine") -> None:
    """Answer messages until there are no more."""
    busy = [0.0]
    if engine.ranks is not None:
        compute = engine.runner.compute  # type: ignore[attr-defined]

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return compute(*arguments)
            finally:
                busy[0] += time.perf_counter() - began

        engine.runner.compute = timed  # type: ignore[attr-defined]
    for line in sys.stdin:
        message = json.loads(line)
        if message.pop("do") == "decode":
            reply: dict[str, Any] = decode(engine, **message)
        else:
            reply = prefill(engine, busy, **message)
        print(json.dumps(reply), flush=True)


def decode(engine: "Engine", batch: int, prompt: int, steps: int) -> dict[str, Any]:
    """Seconds of decode steps of a batch, after prompts of this length and two steps that are not timed."""
    V = engine.config.vocab_size
    ids = [engine.add(token_ids(i, prompt, V), max_new_tokens=steps + batch + 9, eos_token_id=[]) for i in range(batch)]
    while engine.stats.prompt_tokens % (batch * prompt) or engine.load().waiting:
        engine.step()
    for _ in range(2):
        engine.step()
    seconds, cpu = [], []
    for _ in range(steps):
        began, worked = time.perf_counter(), time.process_time()
        engine.step()
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - worked)
    for request_id in ids:
        engine.abort(request_id)
    while engine.busy:
        engine.step()
    engine.stats.prompt_tokens = 0
    return {"seconds": seconds, "cpu": cpu}


def prefill(engine: "Engine", busy: list[float], prompt: int, micro_batches: int | None = None) -> dict[str, Any]:
    """Seconds of one forward pass over a prompt."""
    if engine.ranks is not None:
        engine.ranks.parallel = replace(engine.ranks.parallel, micro_batches=micro_batches)
    ids, busy[0] = token_ids(0, prompt, engine.config.vocab_size), 0.0
    began, worked = time.perf_counter(), time.process_time()
    engine.generate(ids, max_new_tokens=1, eos_token_id=[], progress=False)
    engine.stats.prompt_tokens = 0
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - worked, "busy": busy[0]}


def main(arguments: Sequence[str]) -> None:
    """A rank."""
    if arguments == ["links"]:
        links()
        return
    shape, dtype, *numbers = arguments
    tensor, pipeline, threads = map(int, numbers)
    if shape.startswith("{"):  # of the tests
        from minillm.models import published

        published()["given"] = json.loads(shape)
        shape = "given"
    if tensor * pipeline > 1:
        from mpi4py import MPI

        keep_on_core(MPI.COMM_WORLD.rank)
    elif threads < available_cores():
        keep_on_core(0)
    from minillm import Engine
    from minillm.cli.startup import tune_blas
    from minillm.parallel import Parallel

    tune_blas()
    parallel = Parallel(tensor=tensor, pipeline=pipeline)
    options: dict[str, Any] = {"threads": threads, "max_batch_size": 32, "dtype": dtype, "cache_bytes": 1 << 29}
    with Engine.random(shape, parallel=parallel, progress=False, **options) as engine:
        if engine.rank == 0:
            serve(engine)


if __name__ == "__main__":
    main(sys.argv[1:])
