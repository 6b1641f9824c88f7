"""The process that renders chat templates: started with the first request, kept warm, replaced when it is stopped.

Templates are untrusted programs. In a process of its own, a template that never ends, fills the memory or crashes the
interpreter costs its caller one error message; the next request starts a new process. An answer takes some 0.15
ms longer than in the caller's process, 0.5 ms with 50 messages; the first one 0.1 s, since Python and Jinja are loaded.

Where no process can be started (programs frozen into one file, interpreters inside another program), templates are
rendered in the caller's process after a warning: Jinja's sandbox holds there too, but time and memory have no limit.
"""

import atexit
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any, cast

SECONDS = 10.0
"""Time limit of a request; templates of published models take about a millisecond"""

_START = "import sys; sys.path += sys.argv[1:]; import sandbox; sandbox.serve()"
_logger = logging.getLogger("minillm")


class StoppedError(Exception):
    """The process ended while it worked on a request."""


class _Process:
    """A running rendering process."""

    def __init__(self) -> None:
        """Start it.

        Raises:
            OSError: it does not start.
        """
        # Isolated and without `site`: it sees no user's settings, and imports only what Jinja needs.
        places = [str(Path(__file__).parent), *(place for place in sys.path if isinstance(place, str))]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, *places],
            bufsize=0,  # a fork would copy a buffer, and its lock
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in a terminal is for this process
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # on Windows
        )
        self._requests = cast(FileIO, self._process.stdin)
        self._answers = cast(FileIO, self._process.stdout)
        if self._line() is None:
            self.end()
            raise OSError("it ends at once")

    def ask(self, line: bytes) -> bytearray:
        """Send a line and return the answer.

        Raises:
            StoppedError: the process ends before it has answered.
        """
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._requests.write(rest) :]
            reply = self._line()
        except BrokenPipeError:
            reply = None
        if reply is None:
            raise StoppedError(f"it takes more than {SECONDS:g} s, or crashes the interpreter")
        return reply

    def _line(self) -> bytearray | None:
        """The one line that waits to be read; None if the process ends before."""
        line = bytearray()
        while not line.endswith(b"\n"):
            more = self._answers.read(2**20)
            if not more:
                return None
            line += more
        return line

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def end(self) -> None:
        """End the process and close the pipes."""
        self._process.kill()
        self._process.wait()
        self.close()

    def close(self) -> None:
        """Close this side of the pipes."""
        self._requests.close()
        self._answers.close()


class Renderer:
    """Renders chat templates in a process, one request at a time. All threads may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: _Process | None = None
        self._warned = False
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave_to_parent)

    def ask(self, source: str, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer of `sandbox.answer`.

        Args:
            source: the template
            variables: JSON values; None to learn what the template uses

        Raises:
            StoppedError: the template takes too long, or crashes the interpreter.
        """
        request = {"source": source, "seconds": SECONDS} | ({} if variables is None else {"variables": variables})
        line = json.dumps(request)
        with self._lock:
            if self._process is None or not self._process.running:
                self.close()
                self._process = self._started()
            if self._process is not None:
                try:
                    return json.loads(self._process.ask(line.encode() + b"\n"))  # type: ignore[no-any-return]
                except BaseException:  # Ctrl-C too: its answer must not reach the next request
                    self.close()
                    raise
        from .sandbox import answer

        return json.loads(answer(json.loads(line), len(line)))  # type: ignore[no-any-return]

    def _started(self) -> _Process | None:
        try:
            if getattr(sys, "frozen", False) or "py" not in Path(sys.executable or "").name.lower():
                raise OSError("this program is no Python interpreter")
            return _Process()
        except OSError as error:
            if not self._warned:
                _logger.warning(
                    "chat templates are rendered without limits of time and memory, in this process, since no other "
                    "can be started (%s): use only checkpoints that you trust",
                    error,
                )
            self._warned = True
            return None

    def close(self) -> None:
        """End the process, if there is one. The next request starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _leave_to_parent(self) -> None:
        """After a fork, leave the process to the parent: two that write to it would get each other's answers."""
        process, self._process = self._process, None
        if process is not None:
            process.close()
        self._lock = Lock()  # another thread may have held it


RENDERER = Renderer()
