"""Ranks that are processes under mpiexec."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from minillm.cli.main import run

MPIEXEC = shutil.which("mpiexec") or shutil.which("mpiexec", path=str(Path(sys.executable).parent))
SECONDS = 60
"""Within which every rank ends when one fails: a second on an idle machine. Those that would wait wait longer"""


def started(count: int, *words: object, code: str = "", stdin: Any = None) -> "subprocess.Popen[str]":
    """Ranks that run the command line, or a program."""
    program = [sys.executable, *(["-c", code] if code else ["-m", "minillm"]), *map(str, words)]
    return subprocess.Popen(
        [str(MPIEXEC), "-n", str(count), *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=stdin,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "HYDRA_LAUNCHER": "fork"},
    )


def output(count: int, *words: object, code: str = "") -> str:
    process = started(count, *words, code=code)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def alone(*words: object) -> str:
    """What the command line says on one rank, which is this process."""
    with redirect_stdout(StringIO()) as out:
        assert run([*map(str, words)]) == 0
    return out.getvalue()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code and errors; no rank is left."""
    try:
        _, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        end(process)
        process.communicate()
        raise
    return process.returncode, err


def end(process: "subprocess.Popen[str]") -> None:
    """End a process that began a session, and all in it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def ranks_of(process: "subprocess.Popen[str]") -> list[int]:
    """Process ids of the ranks below a process, in their order."""
    parents, numbers = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                variables = (folder / "environ").read_bytes().split(b"\0")
            except (OSError, IndexError):
                continue
            numbers[int(folder.name)] = next((int(word[9:]) for word in variables if word.startswith(b"PMI_RANK=")), -1)

    def is_below(pid: int) -> bool:
        return pid == process.pid or (pid in parents and is_below(parents[pid]))

    found = [pid for pid, rank in numbers.items() if rank >= 0 and is_below(pid) and numbers.get(parents[pid], -1) < 0]
    return sorted(found, key=lambda pid: numbers[pid])


def assert_none_is_left(pids: list[int]) -> None:
    deadline = time.monotonic() + SECONDS  # the launcher may end first
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


under_mpi = [pytest.mark.slow, pytest.mark.skipif(MPIEXEC is None, reason="there is no mpiexec")]
"""Marks of a test file"""
