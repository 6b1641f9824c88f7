"""The positions that a preempted request has lost, and that are computed again before it goes on."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..batch import TokenSequence, common_prefix
from ..cache import PagedCache


class LostSequence(NamedTuple):
    """A sequence of a preempted run."""

    sequence: TokenSequence
    cached: int
    """Number of positions to recompute"""
    parent: TokenSequence | None
    """The sequence with the longest common prefix among those that are recomputed before it"""
    common: int
    """Length of that prefix, whose pages they share"""


class Recompute(NamedTuple):
    """The sequences of one model that a preempted run needs again, longest first."""

    sequences: list[LostSequence]
    pages: int
    """Number of pages that they had"""

    @classmethod
    def of(cls, live: Sequence[TokenSequence]) -> "Recompute":
        """The positions to recompute if these sequences give back their pages.

        Longest first: then a sequence that is a prefix of another shares all its pages, as it may have done before. So
        together they need no more pages than they had.
        """
        lost: list[LostSequence] = []
        for sequence in sorted(live, key=lambda sequence: -sequence.cached):
            if not sequence.cached:
                break
            line = sequence.token_ids[: sequence.line]
            lengths = [common_prefix(line, other.sequence.token_ids[: other.sequence.line]) for other in lost]
            common = max(lengths, default=0)
            parent = lost[lengths.index(common)].sequence if common else None
            lost.append(LostSequence(sequence, sequence.cached, parent, common))
        return cls(lost, num_pages(live))

    def positions(self, cache: PagedCache) -> Iterator[tuple[TokenSequence, int, int]]:
        """The positions left to recompute, except those that wait for another sequence's common prefix.

        Returns:
            Each sequence, its number of positions, and how many of the last of them may not be split.
        """
        for sequence, cached, parent, common in self.sequences:
            if parent is not None and not sequence.cached and parent.cached >= common:
                twin = cache.fork(parent, common)
                sequence.pages, sequence.cached, sequence.state = twin.pages, twin.cached, twin.state
                sequence.first_parts = twin.first_parts
            begins = parent is None or sequence.cached > 0 or parent.cached >= common  # its window has gone on
            if begins and sequence.cached < cached:
                cache.match(sequence, cached)
            if begins and sequence.cached < cached:
                tree = cached - (len(sequence.token_ids) - len(sequence.tree))  # positions of a tree that it had
                yield sequence, cached - sequence.cached, max(0, tree)

    @property
    def done(self) -> bool:
        """True once all is recomputed."""
        return all(lost.sequence.cached >= lost.cached for lost in self.sequences)


def num_pages(live: Sequence[TokenSequence]) -> int:
    """Number of pages of some sequences and of their sources, those that they share counted once."""
    own = len(live[0].pages) if len(live) == 1 else len({page for sequence in live for page in sequence.pages})
    sources = {sequence.encoder_input for sequence in live}
    return own + sum(len(source.pages) for source in sources if source is not None)
