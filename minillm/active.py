"""A request while it waits or runs: its sequences, its feeds, and the rows that these gave."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from .backends.base import Backend
from .batch import Sequence as Tokens
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
    live: dict[str, list[Tokens]] = field(default_factory=dict)
    """Each model's sequences, in the order of the last feeds to it"""
    feeds: list[Feed] = field(default_factory=list)
    fed: list[Tokens] = field(default_factory=list)
    """The sequence that each feed became"""
    outputs: list["Slice | None"] = field(default_factory=list)
    """What each feed gave, once it is computed"""
    started: bool = False
    """The prompt has been computed"""

    @property
    def ready(self) -> bool:
        """All that the feeds asked for is there."""
        return bool(self.outputs) and None not in self.outputs

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

    def copy(self) -> "Slice":
        """The same rows in arrays of their own, which outlive the next forward pass."""
        rows = slice(self.first, self.stop)
        output = Output(self.output.logits[rows].copy(), self.output.hidden[rows].copy())
        return Slice(output, 0, self.stop - self.first)


def place_of_choice(group: Sequence[Active], ops: Backend) -> Backend:
    """Where requests with the same strategy choose: on the back end that made their logits, or on its host.

    They come to the host where anything is done with them but a choice: by the strategy, or by what guides a request.
    """
    looked_at = any(active.request.guide is not None for active in group) or not group[0].strategy.on_device
    return ops.host if looked_at else ops


def gather(group: Sequence[Active], ops: Backend, place: Backend) -> Rows:
    """The outputs of several requests' feeds, end to end: made by `ops`, and where `place` looks for them."""
    slices = [piece for active in group for piece in active.outputs if piece is not None]
    starts = list(accumulate((piece.stop - piece.first for piece in slices), initial=0))
    wants_hidden = any(feed.hidden for active in group for feed in active.feeds)
    hidden = ops.to_host(_end_to_end(slices, attrgetter("hidden"), ops.xp)) if wants_hidden else None
    logits = _end_to_end(slices, attrgetter("logits"), ops.xp)
    return Rows(logits if place is ops else ops.to_host(logits), starts, hidden)


def _end_to_end(slices: list[Slice], part: Callable[[Output], Any], xp: Any) -> Any:
    """One part of the outputs; without a copy where the slices lie end to end already."""
    if all(a.output is b.output and a.stop == b.first for a, b in pairwise(slices)):
        return part(slices[0].output)[slices[0].first : slices[-1].stop]
    return xp.concatenate([part(piece.output)[piece.first : piece.stop] for piece in slices])
