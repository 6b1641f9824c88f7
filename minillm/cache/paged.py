"""K/V tensors in pages with a block table per sequence (Kwon et al., "PagedAttention", arXiv 2309.06180, section 4).

A page holds P positions of all K heads in every layer. A sequence owns a list of pages, its block table; position i
is in page i // P at offset i % P. Forking shares pages by reference counting; the one page that two sequences would
both write to is copied on write.

Layers with keys and values of other shapes have arrays of their own for the same pages. Layers with a sliding window
keep what can still be seen, if the cache is told what runs at once (`windows.py`); otherwise all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from numpy.typing import NDArray

from ..backends.operations import Backend
from ..batch import Batch, TokenSequence, common_prefix
from ..config import ModelConfig
from ..errors import CacheFullError
from .windows import MARGIN, Concurrency, PageCounts, WindowPages, reserve_groups


class PagedCache:
    """One model's paged K/V cache. Memory is reserved at once; the system commits it as pages are first used."""

    has_states: ClassVar[bool] = False
    """True if layers keep states beside keys and values (`states.py`)"""
    whole_positions = 1
    """Prefixes that are shared by whole pages end at multiples of so many positions"""
    prefix_cache = False
    """True if sequences with the same beginning share pages (`PrefixCache`)"""
    apart = False
    """True while results may differ from the model's: their keys and values share pages with no other text"""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        num_pages: int,
        page_size: int | None = None,
        layers: range | None = None,
        shared: bool = False,
        concurrency: Concurrency | None = None,
    ) -> None:
        """Reserve `num_pages` pages of `page_size` positions (or the backend's choice).

        Args:
            config: the model's
            backend: has the memory
            num_pages: number of pages
            page_size: P
            layers: the layers that are held, by default all
            shared: all layers take turns in the memory of one
            concurrency: what runs at once: layers with a window then keep no more than it sees. None: they keep all
        """
        assert self.has_states or not config.layer_states, "a model with states needs a cache of `new_cache`"
        self.page_size = page_size or backend.memory.page_size
        self.num_pages = num_pages
        self.storage, self.windows = reserve_groups(
            config.kv_groups,
            backend.memory,
            PageCounts(num_pages, self.page_size),
            range(config.num_layers) if layers is None else layers,
            shared=shared,
            concurrency=concurrency,
            known=self._is_known,
        )
        self.copied_positions = 0
        """Positions copied so far, each in all layers."""
        self._unbacked = list(range(num_pages - 1, -1, -1))
        """Pages that take no memory, never used or trimmed; the last one is taken first"""
        self.clear()

    def clear(self) -> None:
        """Free all pages. Existing sequences must not be used again."""
        for window in self.windows:
            window.clear()
        self._references = [0] * self.num_pages
        self._free = sorted({*range(self.num_pages)} - {*self._unbacked}, reverse=True)
        """Pages that take memory and that nobody uses; the one that was freed last is taken first"""

    @property
    def num_states(self) -> int:
        """Number of slots for states: none in a model without them."""
        return 0

    @property
    def free_pages(self) -> int:
        """Number of pages that no sequence uses."""
        return len(self._free) + len(self._unbacked)

    @property
    def cached_pages(self) -> int:
        """Number of free pages that prompts may find."""
        return 0

    @property
    def backed_pages(self) -> int:
        """Number of pages that take memory."""
        return self.num_pages - len(self._unbacked)

    @property
    def backed_bytes(self) -> int:
        """Bytes of the pages that take memory, where it is committed late; elsewhere all do."""
        parts = {id(window.storage): window.backed / window.num_parts for window in self.windows}
        pages = self.backed_pages / self.num_pages
        stored = self.storage.groups or (self.storage,)
        return round(sum(memory.nbytes * parts.get(id(memory), pages) for memory in stored))

    @property
    def max_bytes(self) -> int:
        """Bytes of all pages."""
        return int(sum(memory.nbytes for memory in self.storage.groups or (self.storage,)))

    def takes(self, pages: int) -> bool:
        """Whether so many pages can be taken in any case."""
        return self.free_pages >= pages and all(window.free_parts >= pages for window in self.windows)

    def pages_for(self, tokens: int) -> int:
        """Number of pages that a context of `tokens` positions takes."""
        return -(-tokens // self.page_size)

    def owners(self, page: int) -> int:
        """Number of sequences that use a page."""
        return self._references[page]

    def with_states(self, batch: Batch, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> Batch:
        """The batch with the places of states, in a cache that has some."""
        return batch

    def state_after(self, page: int) -> dict[str, NDArray[Any]]:
        """The state after the last position of a page, which has one, in a cache with states; [...] each."""
        return {}

    def keep_state(self, page: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep what `state_after` has returned, in a cache with states, with the page of a text that is restored."""

    # --- growing ------------------------------------------------------------------------------------------------------

    def reserve(self, sequence: TokenSequence, tokens: int) -> None:
        """Allocate pages for `tokens` positions, and unshare the page written next.

        Raises:
            CacheFullError: no page is left. The sequence keeps its pages.
        """
        if self.windows:
            self._slide(sequence)
        first = sequence.cached // self.page_size  # the page of the next position
        if first < len(sequence.pages):
            sequence.pages[first] = self._own(sequence.pages[first], sequence.cached % self.page_size)
        for _ in range(len(sequence.pages), self.pages_for(tokens)):
            sequence.pages.append(self._take())
        if sequence.encoder_input is not None:
            sequence.encoder_input.hold(sequence, self.pages_for(len(sequence.encoder_input.token_ids)), self._take)

    def advance(self, sequence: TokenSequence, count: int) -> None:
        """Count the next `count` pending tokens as cached."""
        sequence.cached += count
        if self.windows and count > MARGIN:  # a prompt may wait long for its next turn
            self._slide(sequence)

    def match(self, sequence: TokenSequence, limit: int | None = None) -> int:
        """Number of positions that a sequence could take over from others, and has: none without a prefix cache."""
        return 0

    def computes_next(self, leader: TokenSequence, count: int, follower: TokenSequence) -> bool:
        """True if computing the next `count` tokens of `leader` computes tokens that `follower` then need not."""
        return False

    # --- forking and freeing ------------------------------------------------------------------------------------------

    def fork(
        self, sequence: TokenSequence, keep: int | None = None, spares: Iterable[TokenSequence] = ()
    ) -> TokenSequence:
        """A second sequence that continues the first one's first `keep` cached positions (all of them by default).

        Full pages are shared from then on. Pending tokens are not copied. If positions are gone that a window sees
        there (`windows.py`), nothing is shared, and its tokens are pending.

        Args:
            sequence: the sequence to fork
            keep: number of positions
            spares: sequences about to be freed. A dropped beam usually diverged from a kept one a few tokens ago:
                the fork takes over its last page and copies only the positions that differ, not the whole page.
        """
        keep = sequence.cached if keep is None else keep
        assert keep <= sequence.cached
        pages = sequence.pages[: self.pages_for(keep)]
        fork = replace(
            sequence,
            token_ids=sequence.token_ids[:keep],
            cached=keep,
            pages=pages,
            reused=min(keep, sequence.reused),
            tree=(),
        )
        if self.windows and not self._whole(fork):
            fork.pages, fork.first_parts, fork.cached, fork.reused = [], (), 0, 0
            return fork
        for page in pages:
            self._references[page] += 1
        for window in self.windows:
            for page in pages[window.first(fork) :]:
                window.use(page)
        if keep % self.page_size:
            self._write_over(sequence, keep, pages, spares)
        return fork

    def _write_over(
        self, sequence: TokenSequence, keep: int, pages: list[int], spares: Iterable[TokenSequence]
    ) -> None:
        """Replace the last of `pages` by the last of the spare with the longest common prefix, copying the rest."""
        start = keep - keep % self.page_size  # first position of the page
        best, common = None, start
        for spare in spares:
            if len(spare.pages) == len(pages) and self._references[spare.pages[-1]] == 1:
                same = common_prefix(sequence.token_ids[:keep], spare.token_ids[: spare.line])
                if same > common:
                    best, common = spare, same
        if best is not None:
            taken = self._own(best.pages[-1], common - start)
            self._copy(pages[-1], taken, slice(common - start, keep - start))
            self._leave(pages[-1])
            self._release(pages[-1])
            pages[-1] = taken
            best.pages.pop()
            self.truncate(best, start)

    def truncate(self, sequence: TokenSequence, keep: int) -> None:
        """Drop everything after the first `keep` positions, and pending tokens.

        If positions are gone that a window sees there (`windows.py`), all tokens become pending.
        """
        assert keep <= sequence.cached
        self._drop_pages(sequence, self.pages_for(keep))
        del sequence.token_ids[keep:]
        sequence.cached, sequence.reused = keep, min(keep, sequence.reused)
        if self.windows and not self._whole(sequence):
            self._drop_pages(sequence, 0)
            sequence.cached, sequence.reused, sequence.first_parts = 0, 0, ()
        if not keep and sequence.encoder_input is not None:
            sequence.encoder_input.release(sequence, self._release)

    def forget(self, sequence: TokenSequence) -> None:
        """Free the pages but keep the tokens; all become pending again."""
        tokens = sequence.token_ids.copy()
        self.truncate(sequence, 0)
        sequence.token_ids = tokens

    def free(self, sequence: TokenSequence) -> None:
        """Free all pages."""
        self.truncate(sequence, 0)

    def retire(self, sequence: TokenSequence) -> None:
        """Free all pages of a finished text."""
        self.free(sequence)

    def discard(self, sequence: TokenSequence) -> None:
        """Free all pages of a failed text."""
        self.free(sequence)

    def trim(self) -> None:
        """Give the memory of pages that nobody uses back to the system. Pages that prompts may find keep theirs.

        Where memory is not committed late, nothing is given back.
        """
        if self.storage.trim([*self._free, *self._unbacked]):  # together, as parts of the system's pages
            self._unbacked += sorted(self._free, reverse=True)
            self._free = []
        for window in self.windows:
            window.trim()

    # --- layers with a window -----------------------------------------------------------------------------------------

    def _is_known(self, page: int) -> bool:
        """Whether prompts may find a page."""
        return False

    def _whole(self, sequence: TokenSequence) -> bool:
        """Whether a sequence has all positions that its next token sees."""
        return all(window.whole(sequence) for window in self.windows) if sequence.cached else not sequence.first_parts

    def _slide(self, sequence: TokenSequence) -> None:
        """Leave what no later token of a sequence sees."""
        sequence.first_parts = tuple([window.slide(sequence) for window in self.windows])

    def _leave(self, page: int) -> None:
        """A sequence no longer needs a page that it might still see."""
        for window in self.windows:
            window.leave(page)

    # --- single pages -------------------------------------------------------------------------------------------------

    def _take(self) -> int:
        """A page that nobody uses."""
        if not self.free_pages:
            raise CacheFullError(
                f"the K/V cache's {self.num_pages} pages of {self.page_size} positions are all in use: "
                "lower max_batch_size or max_new_tokens, or raise cache_bytes"
            )
        page = self._next_free()
        if self.windows:
            self._take_parts(page)
        self._references[page] = 1
        return page

    def _take_parts(self, page: int) -> None:
        taken: list[WindowPages] = []
        try:
            for window in self.windows:
                window.take(page)
                taken.append(window)
        except CacheFullError:
            self._free.append(page)
            for window in taken:
                window.leave(page)
            raise

    def _next_free(self) -> int:
        return (self._free or self._unbacked).pop()

    def _own(self, page: int, used: int) -> int:
        """A page to write to after its first `used` positions: itself if it is not shared, else a copy of these."""
        if self._references[page] == 1:
            return page
        copy = self._take()
        self._copy(page, copy, slice(0, used))
        if self.windows:
            self._leave(page)
        self._release(page)
        return copy

    def _copy(self, source: int, target: int, positions: slice) -> None:
        self.storage.copy(source, target, positions)
        for window in self.windows:
            window.copy(source, target, positions)
        self.copied_positions += positions.stop - positions.start

    def _drop_pages(self, sequence: TokenSequence, keep: int) -> None:
        """Release all but the first `keep` pages, the last one first."""
        for window in self.windows:
            window.drop(sequence, keep)
        for page in reversed(sequence.pages[keep:]):
            self._release(page)
        del sequence.pages[keep:]

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        if not self._references[page]:
            self._free.append(page)
