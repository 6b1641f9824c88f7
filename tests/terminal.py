"""A command in a pseudo-terminal, and a stream that is one, for tests of what a user sees and types."""

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from pathlib import Path

from .children import prepared

ROOT = Path(__file__).parents[1]


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, command: list[str], **variables: str) -> None:
        """Start it with these variables in its environment."""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        environment = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"} | variables
        environment.pop("COLUMNS", None)  # pytest-xdist sets it; the size is the terminal's
        self.process = subprocess.Popen(
            prepared("import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)", command),
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._shown = b""  # and not asked for yet

    def type(self, line: str) -> None:
        """Type a line and the Enter key."""
        self.write(f"{line}\r")

    def write(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def read_until(self, end: str, seconds: float = 120) -> str:
        """The next that is shown, up to `end` or the command's own end, without colours and moves of the cursor."""
        deadline = time.monotonic() + seconds
        while end not in plain(self._shown):
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{end!r} was not shown in {seconds} seconds, but {self._shown!r}"
            try:
                more = os.read(self._ours, 4096)
            except OSError:  # as Linux says that the other end is closed
                break
            self._shown += more
        before, found, rest = plain(self._shown).partition(end)
        self._shown = rest.encode()
        return before + found

    def close(self) -> int:
        """Wait for the command's end. Returns its exit code."""
        code = self.process.wait(timeout=60)
        os.close(self._ours)
        return code


class Screen(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """Lines as they stand there in the end."""
        return [line.rpartition("\r")[2].rstrip() for line in self.getvalue().split("\n")][:-1]


def plain(shown: bytes) -> str:
    """Text without escape sequences."""
    text = re.sub(r"\x1b(\[[0-9;?]*[a-zA-Z]|[()][A-B0]|[=>])", "", shown.decode(errors="replace"))
    return text.replace("\r\n", "\n")
