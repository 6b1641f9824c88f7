"""Small forward passes, each recorded as a program when its kind first runs, with the workspace they use.

A program repeats launches with the same addresses. So each kind of pass has its own workspace, from which everything
that changes between passes is read. The first run launches call by call and records; later ones run the program. Decode
steps of as many sequences are of one kind; so are verifications of as many guessed tokens.
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
"""Kinds of passes kept for a model; the least recently used one is dropped."""

Kind = tuple[int, ...]
"""Threads, and the new tokens of each sequence."""


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
