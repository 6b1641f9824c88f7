"""A request while it waits or runs: its sequences, its feeds, and the rows that these gave."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from .backends.base import Backend
from .batch import TokenSequence
from .decoding.strategy import Feed, Request, Rows, State, Strategy
from .runner import Output


@dataclass(eq=False)
class Active:
    """A request that waits or runs."""

    id: int
    request: Request
    strategy: Strategy
    width: int
    pages: int
    state: State | None = None
    live: dict[str, list[TokenSequence]] = field(default_factory=dict)
    """Each model's sequences, in the order of the last feeds to it"""
    feeds: list[Feed] = field(default_factory=list)
    fed: list[TokenSequence] = field(default_factory=list)
    """The sequence that each feed became"""
    outputs: list["Slice | None"] = field(default_factory=list)
    """What each feed gave, once it is computed"""
    started: bool = False
    """The prompt has been computed"""

    @property
    def ready(self) -> bool:
        """All that the feeds asked for is there."""
        return bool(self.outputs) and None not in self.outputs

    def keep_outputs(self) -> None:
        """Copy what is there, so that it outlives the next forward pass."""
        self.outputs = [piece and piece.copy() for piece in self.outputs]

    def divisible(self, i: int) -> bool:
        """A feed may be computed in parts when only its last row is wanted and there is no other to its model."""
        feed = self.feeds[i]
        if feed.rows != "last" or self.fed[i].pending == 1:
            return False
        return sum(other.model == feed.model for other in self.feeds) == 1


class Slice(NamedTuple):
    """The rows of a forward pass that belong to one feed."""

    output: Output
    first: int
    stop: int
    own: bool = False
    """The output is a copy, and holds nothing else"""

    def copy(self) -> "Slice":
        """The same rows in arrays of their own, which outlive the next forward pass."""
        if self.own:
            return self
        rows = slice(self.first, self.stop)
        output = Output(self.output.logits[rows].copy(), self.output.hidden[rows].copy())
        return Slice(output, 0, self.stop - self.first, own=True)


def place_of_choice(group: Sequence[Active], backend: Backend) -> Backend:
    """Where requests with the same strategy choose: on the backend that made their logits, or on its host.

    They come to the host where anything is done with them but a choice: by the strategy, or by what guides a request.
    """
    looked_at = any(active.request.guide is not None for active in group) or not group[0].strategy.on_device
    return backend.host if looked_at else backend


def gather(group: Sequence[Active], backend: Backend, place: Backend) -> Rows:
    """The outputs of several requests' feeds, end to end: made by `backend`, and where `place` looks for them."""
    slices: list[Slice] = []
    starts, wants_hidden = [0], False
    for active in group:
        for feed, piece in zip(active.feeds, active.outputs, strict=True):
            assert piece is not None
            slices.append(piece)
            starts.append(starts[-1] + piece.stop - piece.first)
            wants_hidden = wants_hidden or feed.hidden
    logits = _end_to_end(slices, "logits", backend.xp)
    hidden = backend.to_host(_end_to_end(slices, "hidden", backend.xp)) if wants_hidden else None
    return Rows(logits if place is backend else backend.to_host(logits), starts, hidden)


def _end_to_end(slices: list[Slice], part: Literal["logits", "hidden"], xp: Any) -> Any:
    """One part of the outputs; without a copy where the slices lie end to end, and itself where they are all of it."""
    for a, b in pairwise(slices):
        if a.output is not b.output or a.stop != b.first:
            return xp.concatenate([getattr(piece.output, part)[piece.first : piece.stop] for piece in slices])
    whole, first, stop = getattr(slices[0].output, part), slices[0].first, slices[-1].stop
    return whole if stop - first == len(whole) else whole[first:stop]
