"""The other end of `peer_worker.py`: an engine in a process of its own, and the tasks it is given."""

import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from harness import BenchmarkError

SCRIPT = Path(__file__).parent / "peer_worker.py"


class Task(NamedTuple):
    """One thing that is measured."""

    name: str
    batch: int
    prompt: int
    new_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens that a burst is credited with: those of the prompt, or all that came after each first one."""
        return self.prompt if self.new_tokens == 1 else self.batch * (self.new_tokens - 1)


class Worker:
    """An engine in a process of its own."""

    def __init__(self, name: str, engine: str, model: str, threads: int, environment: dict[str, str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), engine, model, str(threads)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    def __enter__(self) -> "Worker":
        try:
            self._receive()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            pipe.close()

    def run(self, task: Task, vocab_size: int) -> float:
        """Seconds of one burst."""
        assert self._process.stdin is not None
        message = {**task._asdict(), "vocab_size": vocab_size}
        with suppress(BrokenPipeError):  # if it has ended, what it said last is told below
            print(json.dumps(message), file=self._process.stdin, flush=True)
        return float(self._receive()["seconds"])

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:] or ["it said nothing"]
            raise BenchmarkError(f"{self.name} ended before it answered: {last[0]}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def write_checkpoint(shape: str, folder: str, environment: dict[str, str]) -> None:
    """Write the random weights that the peers load.

    Raises:
        BenchmarkError: it failed; with the last line it said.
    """
    command = [sys.executable, str(SCRIPT), "checkpoint", shape, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise BenchmarkError(f"the peers' checkpoint could not be written: {last[0]}")
