"""States beside keys and values: what convolutions and recurrences keep of a sequence, of a fixed size.

A state is the state *after* a position. It lies in a slot, the same in all layers, is written once, by the pass that
computes the position, and never changed: a pass reads one slot of a sequence and writes others. So a pass can be
computed again after a failure, and forks share slots by reference counting; nothing is copied.

A sequence keeps the slots after its last position, and after the one where its last pass began to guess. Besides there
are snapshots at page borders, which belong to the pages before them, as many as there are slots. A sequence that is
truncated goes on from the last of these positions that it still has, and computes the few tokens after it again, with
its next ones. So guesses, beams and preemption give the tokens, and the bits, of a text that is computed in one go, if
the operations do so for each token alone (`reference/convolution.py`).

A prompt finds the pages of the prefix cache up to the last that has a snapshot: whole pages, and a state. Snapshots are
dropped when their page is used for something else, or their slot for a sequence; the least recently used go first.
"""

import bisect
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..backends.operations import Backend
from ..backends.states import SLOTS_PER_SEQUENCE, States, state_bytes
from ..batch import BEGINNING, NO_SLOT, Batch, TokenSequence, state_before
from ..config import ModelConfig
from ..errors import CacheFullError
from .paged import PagedCache
from .prefix import Node, PrefixCache
from .prefix_files import PrefixPages
from .prefix_store import StoringPrefixCache

SNAPSHOT_POSITIONS = 128
"""Snapshots are at least so many positions apart, also where pages have fewer"""

Cache = TypeVar("Cache", bound=PagedCache)


@dataclass(eq=False)
class SequenceState:
    """The slots of one sequence, each with a reference."""

    known: list[tuple[int, int]] = field(default_factory=list)
    """Positions and the slots of the states after them, ascending; the last is that of all cached positions"""
    planned: list[tuple[int, int]] | None = None
    """The same, of the pass that runs"""
    mark: int = 0
    """Length of the sequence when it was truncated: what follows may be guesses"""


class Slots:
    """Which slots are in use, and the snapshots."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._references = [0] * count
        self._free = list(range(count - 1, -1, -1))  # the one that was freed last is taken first
        self.of_page: OrderedDict[int, int] = OrderedDict()
        """Page -> slot of the state after its last position; the most recently used last"""

    @property
    def free(self) -> Sequence[int]:
        """The slots that hold none."""
        return self._free

    @property
    def in_use(self) -> int:
        """Number of slots that hold a state."""
        return self.count - len(self._free)

    def references(self, slot: int) -> int:
        """Number of sequences, passes and snapshots that use a slot."""
        return self._references[slot]

    @property
    def available(self) -> bool:
        """Whether `take` finds a slot."""
        return bool(self._free) or any(self._references[slot] == 1 for slot in self.of_page.values())

    def take(self) -> int:
        """A slot that nobody uses, with one reference.

        Raises:
            CacheFullError: sequences use all of them.
        """
        while not self._free:
            page = next((page for page, slot in self.of_page.items() if self._references[slot] == 1), None)
            if page is None:
                raise CacheFullError(
                    f"all {self.count} slots for states are in use: lower max_batch_size, or raise cache_bytes"
                )
            self.drop(page)
        slot = self._free.pop()
        self._references[slot] = 1
        return slot

    def share(self, slot: int) -> int:
        """Add a reference."""
        self._references[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """Take away a reference."""
        self._references[slot] -= 1
        if not self._references[slot]:
            self._free.append(slot)

    def snapshot(self, page: int, slot: int) -> None:
        """Keep a state with a page that has none."""
        if page not in self.of_page:
            self.of_page[page] = self.share(slot)

    def drop(self, page: int) -> None:
        """Drop a page's snapshot, if it has one."""
        slot = self.of_page.pop(page, None)
        if slot is not None:
            self.release(slot)


class StateCache(PagedCache):
    """A paged cache of a model whose layers keep states; a class is made of it and each kind of cache."""

    has_states = True

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        num_pages: int,
        *arguments: Any,
        slots: int | None = None,
        **options: Any,
    ) -> None:
        """As the other class; `slots` for states, by default as many as the pages may need."""
        super().__init__(config, backend, num_pages, *arguments, **options)
        self.slots = Slots(slots or (SLOTS_PER_SEQUENCE + 1) * num_pages + SLOTS_PER_SEQUENCE)
        self.states = self.storage.states = new_states(config, backend, self.slots.count, options.get("layers"))
        self.whole_positions = self.page_size * max(1, SNAPSHOT_POSITIONS // self.page_size)

    @property
    def num_states(self) -> int:
        """Number of slots for states."""
        return self.slots.count

    def clear(self) -> None:
        """Free all pages and slots. Existing sequences must not be used again."""
        super().clear()
        if hasattr(self, "slots"):
            self.slots = Slots(self.slots.count)

    # --- a pass -------------------------------------------------------------------------------------------------------

    def with_states(self, batch: Batch, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> Batch:
        """The batch with the places of states, for whose tokens slots are reserved.

        Raises:
            CacheFullError: no slot is left.
        """
        before: list[int] = []
        borders: list[tuple[SequenceState, int]] = []
        after = [NO_SLOT] * batch.num_tokens
        for sequence, count, span in zip(sequences, counts, batch.spans, strict=True):
            state = sequence.state = sequence.state or SequenceState()
            self._abandon(state)
            start, stop = sequence.cached, sequence.cached + count
            first = state_before(self._slot_at(state, start)) if start else BEGINNING
            before += [first, *range(span.start, span.stop - 1)]
            line = stop
            if span.tree is not None:
                line -= len(span.tree)
                root = len(before) - len(span.tree)
                last = root - 1 if line > start else first
                before[root:] = [root + parent if parent >= 0 else last for parent in sequence.tree]
            for page in sequence.pages[start // self.page_size : self.pages_for(stop)]:
                self.slots.drop(page)
            needed = {position for position in (state.mark, line) if start < position <= line}
            state.planned = []
            for position in sorted(needed):
                state.planned.append((position, self.slots.take()))
            every = self.whole_positions
            borders += [(state, p) for p in range((start // every + 1) * every, line, every) if p not in needed]
        for state, position in borders:  # when all sequences have what they need
            if not self.slots.available:
                break
            assert state.planned is not None
            bisect.insort(state.planned, (position, self.slots.take()))
        for sequence, span in zip(sequences, batch.spans, strict=True):
            for position, slot in sequence.state.planned:
                after[span.start + position - sequence.cached - 1] = slot
        places = np.array([before, after], np.int64)
        return replace(batch, state_before=places[0], state_after=places[1])

    def _slot_at(self, state: SequenceState, position: int) -> int:
        known, slot = state.known[-1]
        assert known == position, (known, position)
        return slot

    def advance(self, sequence: TokenSequence, count: int) -> None:
        """Count the next `count` pending tokens as cached, and keep their states."""
        state, P = sequence.state, self.page_size
        if state is None or state.planned is None:  # not computed, but restored, with a snapshot of the last page
            page, planned = sequence.pages[(sequence.cached + count) // P - 1], []
            if page in self.slots.of_page:
                sequence.state = state = state or SequenceState()
                planned = [(sequence.cached + count, self.slots.share(self.slots.of_page[page]))]
                self.slots.drop(page)
        else:
            planned, state.planned = state.planned, None
        super().advance(sequence, count)  # may put a twin in the place of a page
        if state is None or not planned:
            return
        for position, slot in planned:
            if position % self.whole_positions == 0:
                self.slots.snapshot(sequence.pages[position // P - 1], slot)
        began = [saved for saved in planned[:-1] if saved[0] == state.mark] or state.known[-1:]
        self._hold(state, [*began, planned[-1]], planned)

    def _hold(self, state: SequenceState, known: list[tuple[int, int]], others: Iterable[tuple[int, int]] = ()) -> None:
        """Let a sequence have these slots, of those that it has and of others, and no more."""
        for position, slot in (*state.known, *others):
            if (position, slot) not in known:
                self.slots.release(slot)
        state.known = known

    def _abandon(self, state: SequenceState) -> None:
        """Release what a pass would have written that was not completed."""
        for _, slot in state.planned or ():
            self.slots.release(slot)
        state.planned = None

    # --- forking and freeing ------------------------------------------------------------------------------------------

    def _latest(self, sequence: TokenSequence, keep: int) -> tuple[int, int]:
        """The last position, `keep` at most, after which there is a state, and its slot; 0: the beginning, without."""
        position, slot = max((saved for saved in sequence.state.known if saved[0] <= keep), default=(0, NO_SLOT))
        for border in range(keep // self.page_size * self.page_size, position, -self.page_size):
            page = sequence.pages[border // self.page_size - 1]
            if page in self.slots.of_page:
                return border, self.slots.of_page[page]
        return position, slot

    def fork(
        self, sequence: TokenSequence, keep: int | None = None, spares: Iterable[TokenSequence] = ()
    ) -> TokenSequence:
        """As `PagedCache.fork`; positions after the last with a state are pending in the fork."""
        keep = sequence.cached if keep is None else keep
        if sequence.state is None:
            return super().fork(sequence, keep, spares)
        position, slot = self._latest(sequence, keep)
        twin = super().fork(sequence, position, spares)
        twin.token_ids = sequence.token_ids[:keep]
        twin.state = SequenceState([(position, self.slots.share(slot))] if position else [], mark=keep)
        return twin

    def truncate(self, sequence: TokenSequence, keep: int) -> None:
        """As `PagedCache.truncate`; positions after the last with a state are pending then."""
        state = sequence.state
        if state is None:
            super().truncate(sequence, keep)
            return
        self._abandon(state)
        position, slot = self._latest(sequence, keep)
        tokens = sequence.token_ids[:keep]
        known = [saved for saved in state.known if saved[0] < position]
        if position and (position, slot) not in state.known:
            self.slots.share(slot)
        self._hold(state, [*known, (position, slot)] if position else [])
        super().truncate(sequence, position)
        sequence.token_ids, state.mark = tokens, keep
        if not keep:
            sequence.state = None

    def _next_free(self) -> int:
        page = super()._next_free()
        self.slots.drop(page)
        return page

    def trim(self) -> None:
        """As the other class; snapshots of pages that are free go too, and the memory of free slots."""
        super().trim()
        for page in {*self._unbacked} & self.slots.of_page.keys():
            self.slots.drop(page)
        self.states.trim(self.slots.free)

    # --- restoring ----------------------------------------------------------------------------------------------------

    def state_after(self, page: int) -> dict[str, NDArray[Any]]:
        """The state after the last position of a page, which must have a snapshot. [...] each"""
        return self.states.read(self.slots.of_page[page])

    def keep_state(self, page: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep what `state_after` has returned as the snapshot of a page of a text that is restored."""
        slot = self.slots.take()
        self.states.write(slot, arrays)
        self.slots.drop(page)
        self.slots.snapshot(page, slot)
        self.slots.release(slot)


class StatePrefixCache(StateCache, PrefixCache):
    """A cache with states whose sequences share the pages of a common beginning."""

    def match(self, sequence: TokenSequence, limit: int | None = None) -> int:
        """As `PrefixCache.match`: whole pages alone, up to the last that has a snapshot."""
        if not self.prefix_cache or self.apart or sequence.private:
            return 0
        before, P = sequence.cached, self.page_size
        limit = len(sequence.token_ids) - 1 if limit is None else limit
        limit = min(limit, len(sequence.token_ids) - len(sequence.tree))
        k, pages, whole = before // P, list[int](), 0
        parent = self._parent(sequence, k)
        while parent is not None and (k + len(pages) + 1) * P <= limit:
            first = (k + len(pages)) * P
            parent, common = self._known.find(parent, tuple(sequence.token_ids[first : first + P]))
            if parent is None or common < P:
                break
            pages.append(parent.page)
            whole = len(pages) if parent.page in self.slots.of_page else whole
        if not whole:
            return 0
        for page in pages[:whole]:
            self._use(page)
        self._drop_pages(sequence, k)  # it may have computed a part of the page
        sequence.pages += pages[:whole]
        position, state = (k + whole) * P, sequence.state or SequenceState()
        self._abandon(state)
        self.slots.of_page.move_to_end(pages[whole - 1])
        saved = position, self.slots.share(self.slots.of_page[pages[whole - 1]])
        self._hold(state, [saved])
        state.mark, sequence.state = position, state
        if sequence.reused == before:
            sequence.reused = position
        sequence.cached = position
        return position - before

    def computes_next(self, leader: TokenSequence, count: int, follower: TokenSequence) -> bool:
        """As `PrefixCache.computes_next`: the leader reaches a border of pages up to which they are the same."""
        every = self.whole_positions
        border = (leader.cached + count) // every * every
        return (
            follower.cached < border < len(follower.token_ids)
            and leader.token_ids[:border] == follower.token_ids[:border]
            and super().computes_next(leader, count, follower)
        )


class StateStoringPrefixCache(StoringPrefixCache, StatePrefixCache):
    """The same, whose long texts are stored in a folder."""

    def _copy_of(self, number: int, node: Node, token_ids: list[int]) -> PrefixPages | None:
        slot = self.slots.of_page.get(number)
        if slot is None:
            return None
        try:
            copied = super()._copy_of(number, node, token_ids)
        except KeyError:  # dropped meanwhile
            return None
        return copied if self.slots.of_page.get(number) == slot else None


_KINDS: dict[type[PagedCache], type[PagedCache]] = {
    PagedCache: StateCache,
    PrefixCache: StatePrefixCache,
    StoringPrefixCache: StateStoringPrefixCache,
}
"""Kinds of caches, and the same with states"""


def new_cache(
    kind: type[Cache],
    config: ModelConfig,
    backend: Backend,
    num_pages: int,
    *arguments: Any,
    sequences: int | None = None,
    **options: Any,
) -> Cache:
    """A cache of this kind for a model, with states if its layers keep some.

    `sequences` are those that run at once; by default any number that the pages hold. Other arguments as of the kind.
    """
    if config.layer_states:
        options.pop("concurrency", None)  # its layers with a window, if it has any, keep all positions
        options["slots"] = None if sequences is None else slots_for(config, backend, num_pages, sequences)
    make: Any = _KINDS[kind] if config.layer_states else kind
    cache: Cache = make(config, backend, num_pages, *arguments, **options)
    return cache


def new_states(config: ModelConfig, backend: Backend, slots: int, layers: range | None = None) -> States:
    """Memory for the states of some layers of a model, by default all, which may be none."""
    own = range(config.num_layers) if layers is None else layers
    shapes = {i: config.layer_states[i] for i in own if config.layer_states and config.layer_states[i]}
    return backend.memory.new_states(shapes, slots)


def slots_for(config: ModelConfig, backend: Backend, num_pages: int, sequences: int) -> int:
    """Slots for so many sequences, and for snapshots: one for each page, or as many as take the memory of all pages."""
    snapshots = num_pages * snapshot_bytes(config, backend) // state_bytes(config.layer_states)
    return SLOTS_PER_SEQUENCE * sequences + snapshots


def snapshot_bytes(config: ModelConfig, backend: Backend) -> int:
    """Bytes for snapshots beside each page: a state's, but no more than the page's."""
    return min(state_bytes(config.layer_states), page_bytes(config, backend))


def page_bytes(config: ModelConfig, backend: Backend) -> int:
    """Bytes of the keys and values of a page."""
    memory = backend.memory
    position = memory.position_bytes(config.num_kv_heads, config.head_dim, config.value_dim)
    return len(config.layers_with_keys()) * position * memory.page_size
