"""Prefix cache: finished sequences are kept for prompts with the same prefix.

A chat sends the whole conversation with every turn. Its prefix is already in the cache: a new sequence forks the
longest common prefix and computes only the rest. Kept sequences are evicted, oldest first, when pages run out.
"""

from ..batch import TokenSequence, common_prefix
from .paged import PagedCache


class PrefixCache:
    """Finished sequences of one model, oldest first."""

    def __init__(self, cache: PagedCache, capacity: int = 8) -> None:
        """Keep up to `capacity` sequences of `cache`."""
        self._cache = cache
        self._capacity = capacity
        self._kept: list[TokenSequence] = []
        cache.reclaim = self.evict

    def keep(self, sequence: TokenSequence) -> None:
        """Keep a finished request's sequence."""
        self._kept.append(self._cache.fork(sequence, sequence.line))
        if len(self._kept) > self._capacity:
            self.evict()

    def evict(self) -> bool:
        """Free the oldest sequence; False if there is none."""
        if not self._kept:
            return False
        self._cache.free(self._kept.pop(0))
        return True

    def match(self, token_ids: list[int], adapter: str | None = None) -> TokenSequence | None:
        """A fork of the longest cached prefix of a prompt, leaving at least the last token to compute.

        Only sequences that the same adapter computed have the keys and values that the prompt would get.
        """
        best, length = None, 0
        for sequence in self._kept:
            if sequence.adapter != adapter:
                continue
            common = common_prefix(sequence.token_ids, token_ids[:-1])
            if common > length:
                best, length = sequence, common
        return None if best is None else self._cache.fork(best, length)
