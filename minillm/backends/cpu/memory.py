"""The memory of the CPU backend: small forward passes are recorded as programs, each with a workspace of its own.

A program repeats launches with the same addresses. So each kind of pass has its own workspace, from which everything
that changes between passes is read. The first run launches call by call and records; later ones run the program. Decode
steps of as many sequences are of one kind; so are verifications of as many guessed tokens.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ...batch import Batch
from ...reference.rotary import Rotation
from ...reference.sampling import Draw
from ..clock import Moments
from ..formats import Format
from ..memory import Arena, Memory
from ..pages import Pages, Shape
from ..recording import Result, attempt, touch
from .launching import (
    Angles,
    Argmax,
    Program,
    Scratch,
    address,
    aligned,
    filled,
    kernels,
    launch,
    not_recorded,
    num_threads,
    recorded_so_far,
    recording,
    shares_of,
)

FEW_ROWS = 16
"""Up to this many rows a product is bound by reading its weights; beyond, by arithmetic."""
RECORDED_ROWS = 64
"""Passes of up to this many tokens are recorded: beyond, what the host does between launches is little beside them."""
MOST_STEPS, MOST_LARGE = 8, 2
"""Kinds of passes kept for a model, and how many of more than `FEW_ROWS` tokens, whose logits take much memory;
the least recently used one is dropped."""
PIECE = 4096
"""Logits that the kernel `argmax` searches as one piece of work."""

Kind = tuple[int | str | None, ...]
"""Threads, the new tokens of each sequence, and if any has one the adapter of each."""

_READ = ("token_ids", "positions", "slot_pages", "slot_offsets", "types", "state_before", "state_after")
"""The arrays of a batch that kernels read; without token types and states the last are None."""


class BatchArrays:
    """A batch's sequences as the attention kernel reads them, refilled for each pass of a recorded step."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._calls: list[Any] = []
        """Arguments of `attention` that read these arrays; their addresses follow when an array grows"""
        self._kinds: dict[Any, Any] = {}
        """One of the calls for each window and shape, which decide how much memory parts of results need"""
        self._positions: NDArray[np.int64] | None = None
        self._shared: tuple[int, ...] = ()
        """Sizes, and addresses of what describes the batch"""
        self._results: tuple[int, int] = (0, 0)
        """Addresses of parts of results, and of how many of them are done"""
        self._spans = np.empty((0, 5), np.int64)
        self._tables = np.empty((0, 0), np.int64)
        self._seen = np.empty(0, np.uint8)
        self._parts = np.empty(0, np.float32)
        self._done = np.zeros(0, np.int64)
        self._scratch = Scratch()

    def add(self, batch: Batch, call: Any) -> None:
        """Set the fields of a call's arguments that follow from the batch."""
        if batch is not self._batch:
            self.begin(batch)
        self._scratch.serve(call, "attention", _attention_scratch(call.D))
        self._calls.append(call)
        self._kinds[call.window, call.H, call.K, call.D, call.V] = call
        self._set([call])
        self._grow()

    def begin(self, batch: Batch) -> None:
        """Take the arrays of another batch, for calls that follow."""
        self._calls, self._kinds = [], {}
        self.fill(batch, batch.positions)

    def fill(self, batch: Batch, positions: NDArray[np.int64]) -> None:
        """Take the arrays of another batch, also for the calls so far; kernels read `positions` [T] where they are."""
        self._batch = batch
        N, longest = len(batch.spans), max((len(span.pages) for span in batch.spans), default=0)
        moved = positions is not self._positions
        if self._spans.shape != (N, 5) or self._tables.shape[1] < longest:
            self._spans = np.zeros((N, 5), np.int64)
            self._tables = np.zeros((N, 2 * longest), np.int64)
            moved = True
        masks, spans = [], []
        begin = 0
        for i, span in enumerate(batch.spans):
            m = 0 if span.tree is None else len(span.tree)
            spans.append((span.start, span.stop - span.start, span.context_len, m, begin))
            self._tables[i, : len(span.pages)] = span.pages
            if span.tree is not None:
                masks.append(np.ascontiguousarray(span.tree, np.uint8).ravel())
                begin += m * m
        if N:
            self._spans[...] = spans
        if masks:
            self._seen = np.concatenate(masks)
            moved = True
        if moved:
            self._positions = positions
            arrays: tuple[NDArray[Any], ...] = self._spans, self._tables, self._seen, positions
            self._shared = N, self._tables.shape[1], *map(address, arrays)
            self._set(self._calls)
        self._grow()

    def _grow(self) -> None:
        """Memory for parts of results grows with the longest context."""
        N, needed, heads = len(self._spans), 0, 0
        for call in self._kinds.values():
            needed, heads = max(needed, _attention_parts(call)), max(heads, call.K)
        if len(self._parts) < needed or len(self._done) < N * heads:
            self._parts = aligned(8 * needed).view(np.float32)
            self._done = np.zeros(N * heads, np.int64)
            self._results = address(self._parts), address(self._done)
            self._set(self._calls)

    def _set(self, calls: list[Any]) -> None:
        """Set sizes and addresses, which all calls share."""
        for call in calls:
            call.N, call.table_stride, call.spans, call.tables, call.seen, call.positions = self._shared
            call.parts, call.done = self._results


class Workspace:
    """Results of a pass, and data derived from its batch."""

    def __init__(self) -> None:
        self.arena = Arena(np)
        self.scratch = Scratch()
        self.sequences, self.sources = BatchArrays(), BatchArrays()
        self._groups: dict[int, BatchArrays] = {}
        self._angles: dict[int, tuple[Rotation, NDArray[np.float32], NDArray[np.float32], Any]] = {}
        self._turned: Batch | None = None

    def of_group(self, group: int) -> BatchArrays:
        """The batch as layers of another group read it."""
        return self._groups.setdefault(group, BatchArrays())

    def refill(self, batch: Batch, positions: NDArray[np.int64]) -> None:
        """Set what follows from the next batch of a recorded step, which reads `positions` [T] where they are."""
        self.sequences.fill(batch, positions)
        for group, arrays in self._groups.items():
            arrays.fill(batch.groups[group], positions)
        if batch.cross_rows:
            self.sources.fill(batch.by_source, positions)
        for rotation, *_, growth in self._angles.values():
            if growth is not None:
                growth[...] = rotation.growth(batch)

    def angles(self, rotation: Rotation, batch: Batch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines of each new token's angles, computed once a pass. 2 x [T, r / 2]"""
        if self._turned is not batch:
            self._turned = batch
            self._angles = {}
        if id(rotation) not in self._angles:
            T, half = batch.num_tokens, rotation.pairs
            cosines, sines = np.empty((2, T, half), np.float32)
            growth = rotation.growth(batch)
            arguments = filled(
                Angles, positions=batch.positions, frequencies=rotation.frequencies.data, growth=growth,
                cosines=cosines, sines=sines, T=T, half=half, rows=1 if rotation.short is None else 2,
                scale=float(rotation.scale),
            )  # fmt: skip
            launch("rotary_angles", arguments, shares_of(T))
            self._angles[id(rotation)] = rotation, cosines, sines, growth
        _, cosines, sines, _ = self._angles[id(rotation)]
        return cosines, sines


class Likeliest:
    """Argmax and finiteness of some logits, found by the program that computed them; valid until they change."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        """Launch the search in C-contiguous logits [R, V]; a program being recorded will repeat it."""
        self.logits = logits
        R, V = logits.shape
        self._tokens, self._finite = np.zeros(R, np.int64), np.ones(R, np.int64)
        pieces, done = np.empty((R, -(-V // PIECE)), np.int64), np.zeros(R, np.int64)
        arguments = filled(
            Argmax, logits=logits, tokens=self._tokens, finite=self._finite, pieces=pieces, done=done, R=R, V=V
        )
        launch("argmax", arguments, shares_of(pieces.size))

    def tokens(self) -> list[int]:
        """Per row the smallest id of the largest logit, or of the first NaN if there is one."""
        tokens: list[int] = self._tokens.tolist()
        return tokens

    def finite(self) -> bool:
        """Whether no logit is NaN or plus infinity."""
        return 0 not in self._finite.tolist()  # a reduction of a few numbers takes NumPy ten times as long


class RecordedStep(Generic[Result]):
    """One kind of pass for one owner."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self.likeliest: Likeliest | None = None
        """Argmax and finiteness of its logits, found by the program"""
        self._program = Program()
        self._read: dict[str, Any] = {}
        self._slots: dict[int, Any] = {}
        """`slot_pages` of other groups of layers"""
        self._began = 0
        self._result: Result | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the pass."""
        return len(self._read["token_ids"])

    @property
    def complete(self) -> bool:
        """Whether the program alone computes the whole pass."""
        return self._program.complete

    def record(self, batch: Batch, rows: Any, compute: Callable[[Batch, Any], Result]) -> Result | None:
        """Run `compute` on the step's own workspace, and record what it launches. None if that is not all of it."""
        self._read = {name: getattr(batch, name).copy() for name in _READ if getattr(batch, name) is not None}
        self._slots = {group: other.slot_pages.copy() for group, other in batch.groups.items()}
        with recording(self._program):
            self._result = attempt(compute, self._in_place(batch), rows)
            if self._result is None:
                not_recorded()
            elif self._result[0] is not None:  # else of a pipeline stage that is not the last
                self.likeliest = Likeliest(self._result[0])
        return self._result

    def run(self, batch: Batch, *, watched: bool = False) -> Result:
        """Run the program on another batch of the kind."""
        assert self._result is not None
        for name, target in self._read.items():
            target[...] = getattr(batch, name)
        for group, slots in self._slots.items():
            slots[...] = batch.groups[group].slot_pages
        self.workspace.refill(batch, self._read["positions"])
        self._began = time.perf_counter_ns()
        self._program.run(watched=watched)
        return self._result

    def _in_place(self, batch: Batch) -> Batch:
        """A batch whose arrays are where the program reads them."""
        groups = {
            group: replace(batch.groups[group], **self._read | {"slot_pages": slots})
            for group, slots in self._slots.items()
        }
        return replace(batch, groups=groups, **self._read)

    def moments(self) -> Moments:
        """Start time of the last run and end times of its launches, if it was watched."""
        return Moments(self, self._began, self._program.ended())


class CpuPages(Pages):
    """One model's keys and values; a pass in which anything but a kernel reads them is not recorded."""

    @property
    def layers(self) -> Mapping[int, tuple[Any, Any]]:
        """Each layer's keys and values, for operations. 2 x [pages, K, P, D]"""
        touch()
        return super().layers


class CpuMemory(Memory):
    """The host's memory; small passes are recorded as programs."""

    records_adapters = True
    stage_tokens = RECORDED_ROWS
    tells_moments = sys.platform == "linux"  # where kernels have the clock of `time.perf_counter_ns`

    def __init__(self, cache: str | Format) -> None:
        super().__init__(cache=cache)
        self.likeliest: Likeliest | None = None
        """The argmax of the logits of the pass that ran last, if its program found it"""
        self._plain = Workspace()
        self._steps: WeakKeyDictionary[object, dict[Kind, RecordedStep[Any]]] = WeakKeyDictionary()
        self._use(self._plain)

    def _use(self, workspace: Workspace) -> None:
        self.workspace, self.arena = workspace, workspace.arena

    def trim(self) -> None:
        """As `Memory.trim`; recorded passes, whose results have fixed places, are recorded anew when they next run."""
        self.likeliest = None
        self._steps.clear()
        self._plain = Workspace()
        self._use(self._plain)

    def new_pages(self, shape: Shape, value_dim: int = 0) -> Pages:
        """Memory for a K/V cache [L, pages, K, P, D]; `value_dim` as of `Pages`."""
        return CpuPages(self.xp, shape, self.cache, value_dim)

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
        self.likeliest = None
        if not 0 < batch.num_tokens <= RECORDED_ROWS or len(rows) != batch.num_tokens:  # large, or some rows alone
            return compute(*self.upload(batch, rows)), None
        kind = num_threads(), *(span.stop - span.start for span in batch.spans), *batch.adapters
        steps = self._steps.setdefault(owner, {})
        step: RecordedStep[Result] | None = steps.pop(kind, None)
        moments: Moments | None = None
        result: Result | None = None
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
        if result is None:
            result = compute(*self.upload(batch, rows))
        self.likeliest = step.likeliest if step.complete else None
        steps[kind] = step  # most recently used last
        large = [key for key, recorded in steps.items() if recorded.tokens > FEW_ROWS]
        if len(large) > MOST_LARGE:
            del steps[large[0]]
        elif len(steps) > MOST_STEPS:
            del steps[next(iter(steps))]
        return result, moments


def _attention_scratch(D: int) -> int:
    size: int = kernels().attention_scratch(D)
    return size


def _attention_parts(call: Any) -> int:
    size: int = kernels().attention_parts(ctypes.byref(call))
    return size
