"""Small forward passes, each recorded as a program when it first runs: what one launches, and where its numbers lie.

A program repeats launches with the same addresses. So each kind of pass has a workspace of its own, and all that
changes from pass to pass is read from there. The first run launches call by call and records; from then on the program
is run. Decode steps are of one kind while as many sequences take part; so are guesses that are looked at together.

On two threads of a Zen 5 a step of the demo model took 377 us call by call and takes 195 so, one of opt-125m in int4
3.2 ms and 2.5.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic

import numpy as np

from ...batch import Batch
from ..arena import Arena
from ..base import Result
from ..clock import Moments
from .attention import Attention
from .compiling import num_threads
from .launching import Program, recording
from .likeliest import Likeliest
from .rotary import Rotary

MOST_STEPS = 8
"""Kinds of passes that are kept for a model; the one that was not used for longest makes room."""

Kind = tuple[int, ...]
"""Threads, and the new tokens of each sequence."""


def kind_of(batch: Batch, rows: Any, most_rows: int) -> Kind | None:
    """Which program could compute a pass; None where it is too large, or some of its rows are not wanted."""
    if not 0 < batch.num_tokens <= most_rows or len(rows) != batch.num_tokens:
        return None
    return (num_threads(), *(span.stop - span.start for span in batch.spans))


class Workspace:
    """Where a pass keeps results, and what belongs to its batch."""

    def __init__(self) -> None:
        self.arena = Arena(np)
        self.attention = Attention()
        self.rotary = Rotary()


class RecordedStep(Generic[Result]):
    """One kind of pass for one owner."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self.likeliest: Likeliest | None = None
        """What the program finds in its logits"""
        self._program = Program()
        self._read: list[Any] = []
        self._began = 0
        self._result: Result | None = None

    @property
    def complete(self) -> bool:
        """Whether the program is all that the pass needs."""
        return self._program.complete

    def record(self, batch: Batch, rows: Any, compute: Callable[[Batch, Any], Result]) -> Result:
        """Run `compute` on the step's own workspace, and keep what it launches."""
        self._read = [getattr(batch, name).copy() for name in _READ]
        with recording(self._program):
            self._result = compute(replace(batch, **dict(zip(_READ, self._read, strict=True))), rows)
            self.likeliest = Likeliest(self._result[0])
        return self._result

    def run(self, batch: Batch, *, watched: bool = False) -> Result:
        """What was recorded, on another batch of the kind."""
        assert self._result is not None
        for target, name in zip(self._read, _READ, strict=True):
            target[...] = getattr(batch, name)
        self.workspace.attention.refill(batch)
        self.workspace.rotary.refill(batch)
        self._began = time.perf_counter_ns()
        self._program.run(watched=watched)
        return self._result

    def moments(self) -> Moments:
        """When the last run began and its launches ended, if it was watched."""
        return Moments(self, self._began, self._program.ended())


_READ = ("token_ids", "positions", "slot_pages", "slot_offsets")
"""The arrays of a batch that kernels read."""
