"""Runs batches of inputs in child processes with limits of memory and time, and finds the input that broke one."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..children import prepared

ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.02
START_SECONDS = 60
"""Processor time that a child has before its first input"""

QUIET = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONWARNINGS": "ignore",
}
"""The children's environment: one thread each, no network, the same order of sets each time."""


@dataclass(frozen=True)
class Limits:
    """Limits of a child: address space in bytes for all of it, seconds for one input."""

    memory: int = 3 << 30
    cpu: float = 10
    wall: float = 60


@dataclass(frozen=True)
class Fault:
    """An input that was neither answered nor refused as it should be."""

    subject: str
    number: int
    kind: str
    """Type of the exception, the signal that ended the process, or "hang" """
    place: str
    """File and line of minillm where it happened, as far as that is known"""
    text: str

    def __str__(self) -> str:
        return f"{self.subject} {self.number}: {self.kind} at {self.place}: {self.text}"


@dataclass
class Batch:
    """Results of some inputs."""

    faults: list[Fault] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Calls that were "answered" and "refused" """


@dataclass
class _Watch:
    """State of a running child."""

    process: subprocess.Popen[bytes]
    journal: Path
    number: int | None = None
    """The input that it is at"""
    ended: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0
    _since: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self._since = self._clocks()

    def update(self) -> None:
        """Read what the journal has more."""
        if not self.journal.exists() or self.journal.stat().st_size == self._read:
            return
        with self.journal.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        self._read += len(lines)
        for entry in map(json.loads, lines.splitlines()):
            self.number = entry.get("begin")
            if "end" in entry:
                self.ended.append(entry)
        if lines:
            self._since = self._clocks()

    def overdue(self, limits: Limits) -> str:
        """Which limit the present input has passed; "" if none."""
        cpu, wall = (now - then for now, then in zip(self._clocks(), self._since, strict=True))
        cpu_limit = limits.cpu if self.number is not None else START_SECONDS
        wall_limit = limits.wall if self.number is not None else 5 * START_SECONDS
        return f"{cpu:.1f} s of processor time" if cpu > cpu_limit else f"{wall:.0f} s" if wall > wall_limit else ""

    def _clocks(self) -> tuple[float, float]:
        """Processor time of the child, of its own and of what it waited for, and the time of day."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks = sum(map(int, fields[11:15]))
        except (OSError, ValueError):  # it has ended, or there is no /proc
            ticks = 0
        return ticks / os.sysconf("SC_CLK_TCK"), time.monotonic()


def run_batch(subject: str, start: int, stop: int, limits: Limits = Limits(), *, verbose: bool = False) -> Batch:
    """Run the inputs `start` to `stop` (not included). After one that ends its process the rest go on in a new one."""
    batch = Batch()
    while start < stop:
        start = _run_child(batch, subject, start, stop, limits, verbose=verbose)
    return batch


def _run_child(batch: Batch, subject: str, start: int, stop: int, limits: Limits, *, verbose: bool) -> int:
    """Add what the inputs of one child came to. Returns the number to go on with."""
    with _child(subject, start, stop, limits, verbose=verbose) as (watch, errors):
        ending = _wait(watch, limits, errors)
        said = errors.read_text(encoding="utf-8", errors="replace")
    if verbose:
        print(said, file=sys.stderr)
    for entry in watch.ended:
        batch.counts.update(entry.get("counts", {}))
        if "kind" in entry:
            batch.faults.append(Fault(subject, entry["end"], entry["kind"], entry["place"], entry["text"]))
    if start + len(watch.ended) == stop:
        return stop
    number = watch.number if watch.number is not None else start + len(watch.ended) - 1  # the last one's consequences
    if number < start:
        raise RuntimeError(f"the child of {subject} never began ({ending}):\n{said[-2000:]}")
    stack = _python_stack(said)
    place = next((frame for frame in stack if frame.startswith("minillm/")), "outside minillm")
    text = f"{ending}; {' < '.join(stack[:3]) or said[-200:]!r}"
    batch.faults.append(Fault(subject, number, ending.partition(" ")[0], place, text))
    return number + 1


@contextmanager
def _child(subject: str, start: int, stop: int, limits: Limits, *, verbose: bool) -> Iterator[tuple[_Watch, Path]]:
    """A child at work, and the file with what it writes to stderr; killed, and its files gone, at the end."""
    place = Path(tempfile.mkdtemp(prefix="minillm-fuzz-"))
    errors, work = place / "errors", place / "work"
    work.mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.child",
        subject,
        str(start),
        str(stop),
        str(place / "journal"),
        str(work),
    ]
    environment = (
        os.environ | QUIET | {"HF_HOME": str(place / "hub")} | ({"MINILLM_FUZZ_VERBOSE": "1"} if verbose else {})
    )
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            prepared(_limits_set(limits, stop - start), command),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        yield _Watch(process, place / "journal"), errors
    finally:
        _kill(process)
        shutil.rmtree(place, ignore_errors=True)


def _limits_set(limits: Limits, inputs: int) -> str:
    """Statements that set a child's limits; that of its processor time is for a child whose parent has gone."""
    seconds = int(START_SECONDS + limits.cpu * inputs)
    most = {"RLIMIT_AS": limits.memory, "RLIMIT_CORE": 0, "RLIMIT_CPU": seconds}
    return "import resource\n" + "\n".join(f"resource.setrlimit(resource.{of}, ({n}, {n}))" for of, n in most.items())


def _wait(watch: _Watch, limits: Limits, errors: Path) -> str:
    """Wait for a child's end. Returns how it ended: "exit code", a signal, or "hang"."""
    while watch.process.poll() is None:
        watch.update()
        late = watch.overdue(limits)
        if late:
            at = watch.number
            _ask_where(watch.process, errors)
            watch.update()
            if watch.number == at:
                return f"hang after {late}"
        time.sleep(POLL_SECONDS)
    watch.update()
    code = watch.process.returncode
    return f"{signal.Signals(-code).name} ended the process" if code < 0 else f"exit code {code}"


def _ask_where(process: subprocess.Popen[bytes], errors: Path) -> None:
    """Let faulthandler write where a hanging child is."""
    size = errors.stat().st_size
    process.send_signal(signal.SIGUSR1)
    for _ in range(50):
        time.sleep(POLL_SECONDS)
        if errors.stat().st_size > size:
            break


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a child and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _python_stack(said: str) -> list[str]:
    """File and line of each frame in the last traceback of faulthandler, the innermost first."""
    current = re.findall(r"(?:Current thread|Stack) .*?(?=\n\n|\Z|\n(?:Current thread|Thread|Stack) )", said, re.DOTALL)
    frames = re.findall(r'File "([^"]*)", line (\d+)', current[-1]) if current else []
    return [f"{re.sub(r'.*/(?=minillm/|site-packages/|tests/)', '', path)}:{line}" for path, line in frames]
