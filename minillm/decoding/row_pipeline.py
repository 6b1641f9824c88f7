"""The pipeline of a row of logits: what is done to it before a token is chosen, as a request's settings say.

Most rows are not changed at all: the draw itself applies temperature, top-k, top-p and min-p. Where processors, guides
or other filters are asked for, `row_processing.py` applies them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..backends.token_sampler import TokenSampler
from ..reference.sampling import Parameters
from .continuation import Continuation
from .fields import MASKED, PROCESSED
from .settings import Settings

if TYPE_CHECKING:
    from .processors import LogitsProcessor
    from .strategy import State

Continuations = Sequence[tuple["State", Continuation]]
"""Continuations that get a token, each with its request's state"""

ARGMAX = Parameters(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
UNFILTERED = ARGMAX._replace(temperature=1.0)


@dataclass(frozen=True, eq=False)
class RowPipeline:
    """A request's settings, as they are applied to each of its rows."""

    processors: "tuple[tuple[int, LogitsProcessor], ...]"
    """Each with its place in the order"""
    filters: "tuple[LogitsProcessor, ...]"
    """Filters that mask the row before the draw, which does not support them"""
    draw: Parameters
    """Parameters of `TokenSampler.sample`; a temperature of 0 takes the most likely token"""
    top_logprobs: int | None
    """Number of log-probabilities returned beside the chosen token's; None: not even its own"""

    @classmethod
    def of(cls, settings: Settings, *, masked: bool = False) -> "RowPipeline":
        """The pipeline of some settings; if `masked`, all filters mask the row."""
        processors: tuple[tuple[int, LogitsProcessor], ...] = ()
        if not settings.has_defaults(PROCESSED):
            from .processors import numbered_processors  # most requests need none

            processors = numbered_processors(settings)
        top_logprobs = settings.top_logprobs if settings.logprobs else None
        if not settings.do_sample:
            return cls(processors, (), ARGMAX, top_logprobs)
        if masked or not settings.has_defaults(MASKED):
            from .filters import build_filters  # seldom needed

            return cls(processors, build_filters(settings), UNFILTERED, top_logprobs)
        draw = Parameters(settings.temperature, settings.top_k, settings.top_p, settings.min_p)
        return cls(processors, (), draw, top_logprobs)

    @cached_property
    def changes(self) -> bool:
        """Whether the logits are changed before a token is chosen."""
        return bool(self.processors or self.filters)

    @cached_property
    def filters_read_history(self) -> bool:
        """Whether there is a penalty among the filters, or one that draws a random number."""
        from .filters import READERS

        return any(isinstance(filter_, READERS) for filter_ in self.filters)

    @cached_property
    def forbids(self) -> bool:
        """Whether a processor may forbid a token."""
        return any(getattr(processor, "forbids", True) for _, processor in self.processors)


def take_rows(sampler: TokenSampler, logits: Any, rows: Sequence[int]) -> Any:
    """Some rows of logits; without a copy if they are adjacent, and the same array if they are all. -> [rows, V]"""
    first, count = (rows[0] if rows else 0), len(rows)
    if [*rows] == [*range(first, first + count)]:
        return logits if count == len(logits) else logits[first : first + count]
    return sampler.xp.take(logits, sampler.xp.asarray(rows), axis=0)
