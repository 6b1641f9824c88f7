"""Pages of layers with a sliding window: only those that a query can still see take memory.

The pages of `PagedCache` are those of the layers that keep all positions; the block tables, forks, references and the
prefix tree know only these. Layers with a window have memory of their own, in which a page has a *part* as long as
someone may need it:

- A new page gets a part in each window group. Each sequence that has the page in its block table and may still see it
  is one of the part's users. A sequence keeps the parts from a page number on, `TokenSequence.first_parts`: before its
  next tokens are computed it leaves those that none of them sees, less a margin of `MARGIN` positions.
- A part without users is free; but if prompts may find its page (`PrefixTree`), it stays until its memory is needed,
  the one that was left longest ago going first. A prompt takes over only as many positions as have all parts of their
  last window, so that a hit is whole or shorter.
- Truncating or forking far back, beyond the margin, would need parts that are gone: then nothing is kept, and all
  tokens are computed again. Beams, guesses and lookahead go back by less than the margin.

A text of 8,000 tokens takes 81 MiB in Gemma 3 270M's cache (float32, pages of 128) where it took 284: three of 18
layers have no window, and the others keep 9 parts for 63 pages.

A part is found by its page's number, so forks and prompts that share a page share its parts. Kernels read the block
table of the parts (`table`); before the first part it repeats that one, which the mask hides.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..backends.memory import Memory
from ..backends.pages import Pages
from ..batch import Batch, TokenSequence
from ..config import KVGroup
from ..errors import CacheFullError

MARGIN = 64
"""Positions before a window whose parts a sequence keeps. A GPU's kernel may read so many there, in its first tile; for
one that reads more the table repeats a part, whose numbers weigh nothing"""
KEPT_TIMES = 1
"""Parts without users that a frugal cache keeps for each that sequences have used at most"""


class WindowPages:
    """The parts of one group of layers with a window."""

    frugal = False
    """True if parts without users are dropped before memory is used for the first time"""

    def __init__(
        self,
        number: int,
        group: int,
        window: int,
        storage: Pages,
        counts: "PageCounts",
        planned: int,
        known: Callable[[int], bool],
    ) -> None:
        """Args:
        number: place among the groups with a window
        group: number of the group in `ModelConfig.kv_groups`
        window: W
        storage: of the parts
        counts: the cache's
        planned: parts that sequences need at most, unless more new tokens are computed at once; others are used last
        known: whether prompts may find a page
        """
        self.number, self.group, self.window, self.storage = number, group, window, storage
        self.num_parts: int = storage.keys.shape[1]
        """Parts for which memory is reserved"""
        self._num_pages, self._page_size = counts
        self._planned, self._known = planned, known
        self._unbacked = list(range(self.num_parts - 1, -1, -1))
        """Parts that take no memory, never used or trimmed; the last one is taken first"""
        self._most_used = 0
        self.clear()

    def clear(self) -> None:
        """Free all parts."""
        self.parts = [-1] * self._num_pages
        """The part of each page; -1: it has none"""
        self.users = [0] * self._num_pages
        """Number of sequences that need the part of each page"""
        self._free = sorted({*range(self.num_parts)} - {*self._unbacked}, reverse=True)
        self._left: OrderedDict[int, None] = OrderedDict()
        """Pages that prompts may find and whose parts have no users, the one that was left last at the end"""

    @property
    def free_parts(self) -> int:
        """Number of parts without users."""
        return len(self._free) + len(self._unbacked) + len(self._left)

    @property
    def backed(self) -> int:
        """Number of parts that take memory."""
        return self.num_parts - len(self._unbacked)

    def trim(self) -> None:
        """Give the memory of parts that belong to no page back to the system."""
        if self.storage.trim([*self._free, *self._unbacked]):  # together, as parts of the system's pages
            self._unbacked += sorted(self._free, reverse=True)
            self._free = []

    def table(self, sequence: TokenSequence) -> tuple[int, ...]:
        """A sequence's block table."""
        first, parts = self.first(sequence), self.parts
        table = [parts[page] for page in sequence.pages[first:]]
        return (*[table[0]] * first, *table) if first else tuple(table)

    # --- what a sequence keeps --------------------------------------------------------------------------------------

    def first(self, sequence: TokenSequence) -> int:
        """The number of the first page whose part a sequence keeps."""
        return sequence.first_parts[self.number] if sequence.first_parts else 0

    def whole(self, sequence: TokenSequence) -> bool:
        """Whether a sequence has all positions that the token after its cached ones sees."""
        return self.first(sequence) * self._page_size <= max(0, sequence.cached + 1 - self.window)

    def slide(self, sequence: TokenSequence) -> int:
        """Leave the parts that no token after a sequence's cached ones sees. Returns the first that it keeps."""
        before = self.first(sequence)
        first = max(before, (sequence.cached + 1 - self.window - MARGIN) // self._page_size)
        for page in sequence.pages[before:first]:
            self.leave(page)
        return first

    def drop(self, sequence: TokenSequence, keep: int) -> None:
        """Leave the parts of all but the first `keep` pages, the last one first."""
        for page in reversed(sequence.pages[max(keep, self.first(sequence)) :]):
            self.leave(page)

    def extend(self, sequence: TokenSequence, page: int) -> int:
        """Use the part of a known page that a sequence takes over next. Returns the first that it keeps then.

        Without one, nothing before it can be of use.
        """
        if self.parts[page] >= 0:
            self.use(page)
            return self.first(sequence)
        self.drop(sequence, 0)
        return len(sequence.pages) + 1

    def longest(self, pages: list[int], stop: int, least: int) -> int:
        """The most positions, up to `stop`, of which all parts of the last window are there; at least `least`."""
        while stop > least:
            first = max(0, stop + 1 - self.window) // self._page_size
            last = (stop - 1) // self._page_size
            missing = next((k for k in range(last, first - 1, -1) if self.parts[pages[k]] < 0), None)
            if missing is None:
                return stop
            stop = missing * self._page_size
        return least

    # --- single parts -----------------------------------------------------------------------------------------------

    def take(self, page: int) -> None:
        """Give a new page a part, with one user.

        Raises:
            CacheFullError: all are in use.
        """
        self.forget(page)
        self._most_used = max(self._most_used, self.num_parts - self.free_parts + 1)
        if self._free:
            part = self._free.pop()
        elif self._left and (self.backed >= self._planned or self._keeps_enough()):
            oldest, _ = self._left.popitem(last=False)
            part, self.parts[oldest] = self.parts[oldest], -1
        elif self._unbacked:
            part = self._unbacked.pop()
        else:
            raise CacheFullError(
                f"the K/V cache's {self.num_parts} pages of layers with a window are all in use: "
                "lower max_batch_size, or raise cache_bytes"
            )
        self.parts[page], self.users[page] = part, 1

    def _keeps_enough(self) -> bool:
        return self.frugal and len(self._left) >= KEPT_TIMES * self._most_used

    def use(self, page: int) -> None:
        """Add a user to a page's part."""
        self._left.pop(page, None)
        self.users[page] += 1

    def leave(self, page: int) -> None:
        """Take a user from a page's part."""
        self.users[page] -= 1
        if self.users[page]:
            return
        if self._known(page):
            self._left[page] = None
        else:
            self._drop_part(page)

    def forget(self, page: int) -> None:
        """Drop the part of a page that prompts find no more."""
        if self._left and page in self._left:
            del self._left[page]
            self._drop_part(page)

    def lose(self, sequence: TokenSequence) -> int:
        """Leave all parts of a sequence, since the numbers of the last are not to be had. Returns as `slide`."""
        self.drop(sequence, 0)
        return len(sequence.pages)

    def last_parts(self, pages: Sequence[int]) -> list[int]:
        """The parts of the last of some pages, as many as have one."""
        parts = [self.parts[page] for page in pages]
        first = next((k + 1 for k in range(len(parts) - 1, -1, -1) if parts[k] < 0), 0)
        return parts[first:]

    def may_move(self, page: int, other: int) -> bool:
        """Whether a user of a page's part can have another page with the same numbers instead (`move`)."""
        return self.parts[other] >= 0 or self.users[page] == 1

    def move(self, page: int, other: int) -> None:
        """Use the part of another page with the same numbers in place of this one's, which it gets if it has none."""
        if self.parts[other] >= 0:
            self.use(other)
            self.leave(page)
        else:
            self.parts[other], self.users[other] = self.parts[page], 1
            self.parts[page], self.users[page] = -1, 0

    def copy(self, source: int, target: int, positions: slice) -> None:
        """Copy some positions of a page's part to another's."""
        if self.parts[source] >= 0:
            self.storage.copy(self.parts[source], self.parts[target], positions)

    def _drop_part(self, page: int) -> None:
        self._free.append(self.parts[page])
        self.parts[page] = -1


class PageCounts(NamedTuple):
    """Numbers of pages."""

    pages: int
    page_size: int
    """P"""


class Concurrency(NamedTuple):
    """Limits of what runs at once."""

    sequences: int
    tokens: int
    """The most new tokens of a pass"""

    def parts(self, window: int, num_pages: int, page_size: int) -> int:
        """Number of parts with which pages run out first; never more than pages."""
        own = -(-(window + MARGIN) // page_size) + 2  # one begun at either end
        return min(num_pages, self.sequences * own + -(-self.tokens // page_size))


def reserve_groups(
    groups: Sequence[KVGroup],
    memory: Memory,
    counts: PageCounts,
    layers: range,
    *,
    shared: bool,
    concurrency: Concurrency | None,
    known: Callable[[int], bool],
) -> tuple[Pages, list[WindowPages]]:
    """The memory of a cache: that of the first group of layers, with those of the others, and the windows.

    Arguments as of `PagedCache` and `WindowPages`.
    """
    stored, windows = list[Pages](), list[WindowPages]()
    for number, group in enumerate(groups):
        own = [layer for layer in group.layers if layer in layers]
        places = {layer: 0 if shared else i for i, layer in enumerate(own)}
        slides, pages = group.window is not None and concurrency is not None, counts.pages
        planned = pages
        if group.window is not None and concurrency is not None:
            planned = concurrency.parts(group.window, *counts)
            pages = pages if memory.committed_late else planned
        shape = (len(set(places.values())), pages, group.num_kv_heads, counts.page_size, group.head_dim)
        stored.append(memory.new_pages(shape, group.value_dim))
        stored[-1].places = places
        if group.window is not None and slides:
            windows.append(WindowPages(len(windows), number, group.window, stored[-1], counts, planned, known))
    if len(stored) > 1:
        apart = {window.group for window in windows}
        stored[0].others = tuple(stored[1:])
        stored[0].alike = tuple(pages for number, pages in enumerate(stored) if number and number not in apart)
    return stored[0], windows


def with_parts(
    batch: Batch, sequences: Sequence[TokenSequence], page_size: int, windows: Sequence[WindowPages]
) -> Batch:
    """The batch of some sequences, as layers with a window see it besides (`Batch.groups`)."""
    groups = {}
    for window in windows:
        spans, slots = [], list[int]()
        for sequence, span in zip(sequences, batch.spans, strict=True):
            pages = window.table(sequence)
            spans.append(span._replace(pages=pages))
            places = range(span.context_len - (span.stop - span.start), span.context_len)
            slots += [pages[place // page_size] for place in places]
        slot_pages = np.array(slots, np.int64)
        groups[window.group] = replace(batch, slot_pages=slot_pages, spans=tuple(spans), group=window.group)
    return replace(batch, groups=groups)
