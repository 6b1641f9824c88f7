"""K/V tensors in pages with a block table per sequence (Kwon et al., "PagedAttention", arXiv 2309.06180, section 4).

A page holds P positions of all K heads in every layer. A sequence owns a list of pages, its block table; position i
is in page i // P at offset i % P. Forking shares pages by reference counting; the one page that two sequences would
both write to is copied on write.
"""

from collections.abc import Callable, Iterable

from ..backends.operations import Backend
from ..batch import TokenSequence, common_prefix
from ..config import ModelConfig
from ..errors import CacheFullError


class PagedCache:
    """One model's paged K/V cache. Memory is reserved at once; the system commits it as pages are first used."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        num_pages: int,
        page_size: int | None = None,
        layers: range | None = None,
    ) -> None:
        """Reserve `num_pages` pages of P = `page_size` positions (or the backend's choice) of some layers, or all."""
        layers = layers or range(config.num_layers)
        self.page_size = page_size or backend.memory.page_size
        self.num_pages = num_pages
        shape = (len(layers), num_pages, config.num_kv_heads, self.page_size, config.head_dim)
        self.storage = backend.memory.new_pages(shape)
        self.storage.first_layer = layers.start
        self._references = [0] * num_pages
        self.copied_positions = 0
        """Positions copied so far because of forks, each in all layers."""
        self.reclaim: Callable[[], bool] | None = None
        """Called when no page is free; returns True if it freed something (`PrefixCache`)."""
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Number of pages that a context of `tokens` positions takes."""
        return -(-tokens // self.page_size)

    def reserve(self, sequence: TokenSequence, tokens: int) -> None:
        """Allocate pages for `tokens` positions, and unshare the page written next.

        Raises:
            CacheFullError: no page is left. The sequence keeps its pages.
        """
        first = sequence.cached // self.page_size  # the page of the next position
        if first < len(sequence.pages):
            sequence.pages[first] = self._own(sequence.pages[first], sequence.cached % self.page_size)
        while len(sequence.pages) < self.pages_for(tokens):
            sequence.pages.append(self._take())

    def fork(
        self, sequence: TokenSequence, keep: int | None = None, spares: Iterable[TokenSequence] = ()
    ) -> TokenSequence:
        """A second sequence that continues the first one's first `keep` cached positions (all of them by default).

        Full pages are shared from then on. Pending tokens are not copied.

        Args:
            sequence: the sequence to fork
            keep: number of positions
            spares: sequences about to be freed. A dropped beam usually diverged from a kept one a few tokens ago:
                the fork takes over its last page and copies only the positions that differ, not the whole page.
        """
        keep = sequence.cached if keep is None else keep
        assert keep <= sequence.cached
        pages = sequence.pages[: self.pages_for(keep)]
        for page in pages:
            self._references[page] += 1
        if keep % self.page_size:
            self._write_over(sequence, keep, pages, spares)
        return TokenSequence(sequence.token_ids[:keep], keep, pages, sequence.adapter)

    def _write_over(
        self, sequence: TokenSequence, keep: int, pages: list[int], spares: Iterable[TokenSequence]
    ) -> None:
        """Replace the last of `pages` by that of the spare with the longest common prefix, copying the rest."""
        start = keep - keep % self.page_size  # first position of the page
        best, common = None, start
        for spare in spares:
            if len(spare.pages) == len(pages) and self._references[spare.pages[-1]] == 1:
                same = common_prefix(sequence.token_ids[:keep], spare.token_ids[: spare.line])
                if same > common:
                    best, common = spare, same
        if best is not None:
            self._copy(pages[-1], best.pages[-1], slice(common - start, keep - start))
            self._release(pages[-1])
            pages[-1] = best.pages.pop()
            self.truncate(best, start)

    def truncate(self, sequence: TokenSequence, keep: int) -> None:
        """Drop everything after the first `keep` positions, and pending tokens."""
        assert keep <= sequence.cached
        for page in sequence.pages[self.pages_for(keep) :]:
            self._release(page)
        del sequence.pages[self.pages_for(keep) :], sequence.token_ids[keep:]
        sequence.cached = keep

    def forget(self, sequence: TokenSequence) -> None:
        """Free the pages but keep the tokens, all of which become pending again."""
        tokens = sequence.token_ids.copy()
        self.truncate(sequence, 0)
        sequence.token_ids = tokens

    def free(self, sequence: TokenSequence) -> None:
        """Free all pages."""
        self.truncate(sequence, 0)

    def clear(self) -> None:
        """Free all pages. Existing sequences must not be used again."""
        self._references = [0] * self.num_pages
        self._free = list(range(self.num_pages - 1, -1, -1))
        self.reclaim = None

    def _take(self) -> int:
        self._make_room()
        if not self._free:
            raise CacheFullError(
                f"the K/V cache's {self.num_pages} pages of {self.page_size} positions are all in use: "
                "lower max_batch_size or max_new_tokens, or raise cache_bytes"
            )
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _make_room(self) -> None:
        while not self._free and self.reclaim is not None and self.reclaim():
            pass

    def _own(self, page: int, used: int) -> int:
        """The page itself if it is not shared, else a copy of its first `used` positions."""
        if self._references[page] > 1:
            self._make_room()  # the evicted sequence may be the other owner
        if self._references[page] == 1:
            return page
        copy = self._take()
        self._copy(page, copy, slice(0, used))
        self._release(page)
        return copy

    def _copy(self, source: int, target: int, part: slice) -> None:
        self.storage.copy(source, target, part)
        self.copied_positions += part.stop - part.start

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        if not self._references[page]:
            self._free.append(page)
