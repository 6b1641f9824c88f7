"""Small forward passes, each recorded as a program when its kind first runs, with the workspace they use.

A program repeats launches with the same addresses. So each kind of pass has its own workspace, from which everything
that changes between passes is read. The first run launches call by call and records; later ones run the program. Decode
steps of as many sequences are of one kind; so are verifications of as many guessed tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic
from weakref import WeakKeyDictionary

import numpy as np

from ...batch import Batch
from ...reference.sampling import Draw
from ..formats import Format
from ..memory import Arena, Memory, Moments, Result
from .attention import Attention
from .compiling import num_threads
from .launching import Program, recorded_so_far, recording
from .likeliest import Likeliest
from .rotary import Rotary
from .workers import TELLS_TIME

MOST_STEPS = 8
"""Kinds of passes kept for a model; the least recently used one is dropped."""

Kind = tuple[int, ...]
"""Threads, and the new tokens of each sequence."""


FEW_ROWS = 16
"""Up to this many rows a product is bound by reading its weights; beyond, by arithmetic."""


def kind_of(batch: Batch, rows: Any, most_rows: int) -> Kind | None:
    """The kind of a pass; None if it is too large to record, or some of its rows are not wanted."""
    if not 0 < batch.num_tokens <= most_rows or len(rows) != batch.num_tokens:
        return None
    return (num_threads(), *(span.stop - span.start for span in batch.spans))


class Workspace:
    """Results of a pass, and data derived from its batch."""

    def __init__(self) -> None:
        self.arena = Arena(np)
        self.attention = Attention()
        self.rotary = Rotary()


class RecordedStep(Generic[Result]):
    """One kind of pass for one owner."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self.likeliest: Likeliest | None = None
        """Argmax and finiteness of its logits, found by the program"""
        self._program = Program()
        self._read: list[Any] = []
        self._began = 0
        self._result: Result | None = None

    @property
    def complete(self) -> bool:
        """Whether the program alone computes the whole pass."""
        return self._program.complete

    def record(self, batch: Batch, rows: Any, compute: Callable[[Batch, Any], Result]) -> Result:
        """Run `compute` on the step's own workspace, and record what it launches."""
        self._read = [getattr(batch, name).copy() for name in _READ]
        with recording(self._program):
            self._result = compute(replace(batch, **dict(zip(_READ, self._read, strict=True))), rows)
            self.likeliest = Likeliest(self._result[0])
        return self._result

    def run(self, batch: Batch, *, watched: bool = False) -> Result:
        """Run the program on another batch of the kind."""
        assert self._result is not None
        for target, name in zip(self._read, _READ, strict=True):
            target[...] = getattr(batch, name)
        self.workspace.attention.refill(batch)
        self.workspace.rotary.refill(batch)
        self._began = time.perf_counter_ns()
        self._program.run(watched=watched)
        return self._result

    def moments(self) -> Moments:
        """Start time of the last run and end times of its launches, if it was watched."""
        return Moments(self, self._began, self._program.ended())


_READ = ("token_ids", "positions", "slot_pages", "slot_offsets")
"""The arrays of a batch that kernels read."""


class NumbaMemory(Memory):
    """The host's memory; small passes are recorded as programs."""

    tells_moments = TELLS_TIME

    def __init__(self, cache: str | Format) -> None:
        super().__init__(cache=cache)
        self.likeliest: Likeliest | None = None
        """The argmax of the logits of the pass that ran last, if its program found it"""
        self._plain = Workspace()
        self._steps: WeakKeyDictionary[object, dict[Kind, RecordedStep[Any]]] = WeakKeyDictionary()
        self._use(self._plain)

    def _use(self, workspace: Workspace) -> None:
        self.workspace, self.arena = workspace, workspace.arena

    def run(
        self,
        owner: object,
        batch: Batch,
        rows: Any,
        compute: Callable[[Batch, Any], Result],
        draws: Sequence[Draw | None] = (),
    ) -> Result:
        """Run a small pass as a program, recorded when its kind first runs, and any other pass call by call."""
        result, _ = self._run(owner, batch, rows, compute, watched=False)
        return result

    def run_watched(
        self, owner: object, batch: Batch, rows: Any, compute: Callable[[Batch, Any], Result]
    ) -> tuple[Result, Moments | None]:
        """As `run`; programs also record when each launch ended."""
        return self._run(owner, batch, rows, compute, watched=True)

    def recorded_so_far(self) -> int:
        """Launches so far in the program being recorded."""
        return recorded_so_far()

    def _run(
        self, owner: object, batch: Batch, rows: Any, compute: Callable[[Batch, Any], Result], *, watched: bool
    ) -> tuple[Result, Moments | None]:
        kind = kind_of(batch, rows, FEW_ROWS)
        self.likeliest = None
        if kind is None:
            return compute(*self.upload(batch, rows)), None
        steps = self._steps.setdefault(owner, {})
        step: RecordedStep[Result] | None = steps.pop(kind, None)
        moments: Moments | None = None
        if step is None:
            step = RecordedStep()
            self._use(step.workspace)
            try:
                result = step.record(batch, rows, compute)
            finally:
                self._use(self._plain)
            moments = Moments(step, None, None)
        elif step.complete:
            result = step.run(batch, watched=watched)
            moments = step.moments() if watched else None
        else:
            result = compute(*self.upload(batch, rows))
        self.likeliest = step.likeliest if step.complete else None
        steps[kind] = step  # most recently used last
        if len(steps) > MOST_STEPS:
            del steps[next(iter(steps))]
        return result, moments
