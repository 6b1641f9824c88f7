"""The other end of `peer_worker.py`: an engine in a process of its own."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import BenchmarkError
from peer_plans import Plan

HERE = Path(__file__).parent


class Worker:
    """An engine in a process of its own, loaded when the `with` block begins."""

    def __init__(self, plan: Plan, folder: str, threads: int, environment: dict[str, str]) -> None:
        self.plan = plan
        form = plan.label if plan.engine == "llama.cpp" else plan.form
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "peer_worker.py"), plan.engine, form, folder, str(threads)],
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
            with suppress(BrokenPipeError):
                pipe.close()

    def ask(self, **message: Any) -> dict[str, Any]:
        """The reply to one message of those that `peer_worker.py` lists."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # if it has ended, what it said last is told below
            print(json.dumps(message), file=self._process.stdin, flush=True)
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise BenchmarkError(f"{self.plan.name} ended before it answered: {last_line(self._errors.read())}")
        return parse_reply(line)


def parse_reply(line: str) -> dict[str, Any]:
    """One reply of a worker.

    Raises:
        BenchmarkError: it is no JSON object; something else writes to the worker's channel.
    """
    try:
        reply = json.loads(line)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise BenchmarkError(f"a worker answered {line.strip()[:80]!r}, which is no JSON object")
    return reply


def last_line(text: str) -> str:
    """What a process said last."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"


def write_files(shape: str, folder: str, wanted: Sequence[str], environment: dict[str, str]) -> dict[str, int]:
    """Run `peer_files.py`. Returns the bytes that a token needs of each of llama.cpp's files.

    Raises:
        BenchmarkError: it failed; with the last line it said.
    """
    command = [sys.executable, str(HERE / "peer_files.py"), shape, folder, *wanted]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"the engines' files could not be written: {last_line(done.stderr)}")
    return parse_reply(last_line(done.stdout))
