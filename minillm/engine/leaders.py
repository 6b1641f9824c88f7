"""Prompts that begin alike: the first one computes what they have in common, and the others wait for its pages.

Nothing is remembered of that from step to step. So whatever becomes of the first one, in the next step the others find
what it has computed in the prefix cache, or compute it themselves.
"""

from ..batch import TokenSequence
from ..cache import PagedCache
from ..cache.prefix import WORTH_WAITING
from .run import Chunk


class Leaders:
    """The prompts of a pass so far, found by the tokens that they compute next: one look for each later prompt."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._chunks: list[Chunk] = []
        self._at: dict[int, dict[tuple[int, ...], list[Chunk]]] = {}
        """By a position where a later prompt goes on: those that compute it, by their next `WORTH_WAITING` tokens"""

    def add(self, chunk: Chunk) -> None:
        """Add a prompt with the tokens that the pass computes of it."""
        self._chunks.append(chunk)
        for position, chunks in self._at.items():
            self._note(chunk, position, chunks)

    def lead(self, follower: TokenSequence) -> bool:
        """True if the pass computes tokens that `follower` then need not."""
        at = follower.cached
        if not (self._chunks and self._cache.prefix_cache) or len(follower.token_ids) - at <= WORTH_WAITING:
            return False
        by_tokens = self._at.get(at)
        if by_tokens is None:
            by_tokens = self._at[at] = {}
            for chunk in self._chunks:
                self._note(chunk, at, by_tokens)
        leaders = by_tokens.get(_next_tokens(follower, at), ())
        return any(self._cache.computes_next(chunk.sequence, chunk.tokens, follower) for chunk in leaders)

    def _note(self, chunk: Chunk, position: int, by_tokens: dict[tuple[int, ...], list[Chunk]]) -> None:
        if chunk.sequence.cached <= position < chunk.sequence.cached + chunk.tokens:
            by_tokens.setdefault(_next_tokens(chunk.sequence, position), []).append(chunk)


def _next_tokens(sequence: TokenSequence, position: int) -> tuple[int, ...]:
    return tuple(sequence.token_ids[position : position + WORTH_WAITING])
