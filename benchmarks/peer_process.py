"""An engine in a process of its own, for `against_peers.py`: `Worker` in the parent, `main` in the child.

    python peer_process.py ENGINE FORMAT FOLDER THREADS [cpu-time]

FOLDER is what `peer_files.py` wrote, or a GGUF file. The engine stays loaded, so that a burst measures the work alone.
Messages and replies are JSON, one a line:

    {"do": "time", "batch", "prompt", "new_tokens", "limit", "vocab_size"}    -> {"tokens", "seconds"}
    {"do": "logits", "length", "file", "vocab_size"}                          -> {"file"}, a .npy [T, V]
    {"do": "score", "ids"}                                                    -> {"perplexity"}
    {"do": "memory"}                                                          -> {"peak_bytes"}, or null
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import BenchmarkError, token_ids

if TYPE_CHECKING:  # they import NumPy, whose BLAS the process sets up first
    from peer_engines import Peer
    from peer_plans import Plan


class Worker:
    """An engine in a process of its own, loaded when the `with` block begins."""

    def __init__(
        self, plan: "Plan", folder: str, threads: int, environment: dict[str, str], *, cpu_time: bool = False
    ) -> None:
        self.plan = plan
        form = plan.label if "llama.cpp" in plan.engine else "auto" if plan.same_file else plan.form
        if plan.ours and plan.of_a_file:
            form, folder = "auto", str(Path(folder) / f"{plan.label}.gguf")
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, __file__, plan.engine, form, folder, str(threads), *["cpu-time"] * cpu_time],
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
        """The reply to one message of those listed above."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # if the process has ended, `_receive` reports it
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
        BenchmarkError: it is not a JSON object.
    """
    try:
        reply = json.loads(line)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise BenchmarkError(f"a worker answered {line.strip()[:80]!r}, which is no JSON object")
    return reply


def last_line(text: str) -> str:
    """The last line of a process's output."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"


def write_files(source: str, folder: str, wanted: Sequence[str], environment: dict[str, str]) -> dict[str, int]:
    """Run `peer_files.py`. Returns the bytes that a token needs of each of llama.cpp's files.

    Raises:
        BenchmarkError: it failed; the message has the last line of its output.
    """
    command = [sys.executable, str(Path(__file__).with_name("peer_files.py")), source, folder, *wanted]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"the engines' files could not be written: {last_line(done.stderr)}")
    return parse_reply(last_line(done.stdout))


def answer(peer: "Peer", message: dict[str, Any]) -> dict[str, Any]:
    """The reply to one message."""
    if message["do"] == "memory":
        return {"peak_bytes": peak_bytes()}
    if message["do"] == "score":
        return {"perplexity": perplexity(peer.logits(message["ids"]), message["ids"])}
    if message["do"] == "logits":
        import numpy as np

        np.save(message["file"], peer.logits(token_ids(0, message["length"], message["vocab_size"])))
        return {"file": message["file"]}
    prompts = [token_ids(i, message["prompt"], message["vocab_size"]) for i in range(message["batch"])]
    if message["new_tokens"] == 1:
        return {"tokens": len(prompts[0]), "seconds": peer.prefill(prompts[0])}
    return peer.decode(prompts, message["new_tokens"], message["limit"])._asdict()


def perplexity(logits: Any, ids: Sequence[int]) -> float:
    """exp of the mean surprise of each token after the first. [T, V], T ids"""
    import numpy as np

    surprises = []
    for row, token in zip(logits, ids[1:], strict=False):
        shifted = row.astype(np.float64) - row.max()
        surprises.append(float(np.log(np.exp(shifted).sum()) - shifted[token]))
    return float(np.exp(np.mean(surprises)))


def peak_bytes() -> int | None:
    """Peak memory of this process, mapped files included; None except on Linux."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def main() -> None:
    """Load the engine, report that, and answer messages until standard input ends."""
    engine, form, folder, threads, *clock = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    if engine.startswith("minillm-"):
        from minillm.cli.startup import tune_blas

        tune_blas()  # as the command line does, before NumPy is imported
    import peer_engines

    if clock:
        peer_engines.now = time.process_time
    peer = peer_engines.make(engine, form, folder, int(threads))
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(peer, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
