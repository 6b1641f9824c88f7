"""Which sequences run in the next step (continuous batching: Yu et al., "Orca", OSDI 2022, section 4).

Requests wait in line and are admitted one by one, as soon as the batch has places and the cache has pages for the
worst that they may need: nothing that runs is ever thrown out. Prompts are computed in chunks, so that a long one
does not hold up those that decode.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from .batch import TokenSequence


class Work(Protocol):
    """A request, as the scheduler sees it."""

    width: int
    """Sequences it may run at once"""
    pages: int
    """Pages it may need at most"""


@dataclass(frozen=True)
class Limits:
    """What a step may use."""

    max_batch_size: int
    """Sequences at once"""
    prefill_chunk: int
    """Prompt tokens in one step"""


W = TypeVar("W", bound=Work)


class Scheduler(Generic[W]):
    """First come, first served."""

    def __init__(self, limits: Limits, num_pages: int) -> None:
        self.limits = limits
        self.waiting: deque[W] = deque()
        self.running: list[W] = []
        self._places = limits.max_batch_size
        self._pages = num_pages

    def admit(self) -> list[W]:
        """Move requests from the line into the batch while they fit, in their order."""
        admitted = []
        while self.waiting and self.waiting[0].width <= self._places and self.waiting[0].pages <= self._pages:
            work = self.waiting.popleft()
            self._places -= work.width
            self._pages -= work.pages
            self.running.append(work)
            admitted.append(work)
        return admitted

    def remove(self, work: W) -> None:
        """Take out what is done or aborted, running or not."""
        if work in self.running:
            self.running.remove(work)
            self._places += work.width
            self._pages += work.pages
        else:
            self.waiting.remove(work)

    def counts(self, sequences: Iterable[tuple[TokenSequence, bool]]) -> list[int]:
        """How many pending tokens of each sequence the next forward computes.

        Args:
            sequences: each with whether it may be computed in parts

        Returns:
            All pending ones of a sequence that may not be cut; the others, in their order, share `prefill_chunk`.
        """
        budget = self.limits.prefill_chunk
        counts = []
        for sequence, divisible in sequences:
            count = min(sequence.pending, budget) if divisible else sequence.pending
            if divisible:
                budget -= count
            counts.append(count)
        return counts
