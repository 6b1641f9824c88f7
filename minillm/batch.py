"""Input of a forward pass: token sequences, and the ragged batch made of them.

The new tokens of all sequences are concatenated in one flat array without padding. Prefill, a prefill chunk, decode and
any mixture of them differ only in the number of tokens per sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .encoder_input import EncoderInput

IntArray = NDArray[np.int64]
BEGINNING = NO_SLOT = -1
"""In a batch's `state_before`: nothing is before this token; in `state_after`: its state is not kept"""


def state_before(slot: int) -> int:
    """The number that stands for a slot in `state_before`, and the slot that such a number stands for."""
    return -2 - slot


@dataclass(eq=False)
class TokenSequence:
    """A sequence of tokens and its block table.

    The first `cached` of `token_ids` have their K/V in `pages`; the others are pending.

    The last tokens may form a tree instead of a line: several guesses at what follows, computed together. The position
    of each is given by its depth, and it attends to the line and to its own ancestors.
    """

    token_ids: list[int] = field(default_factory=list)
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    adapter: str | None = None
    """The LoRA adapter that computes it"""
    types: Sequence[int] = ()
    """Each token's type, in models that have some: which of two texts it is in (BERT)"""
    private: bool = False
    """True if it shares no pages with others of the same tokens"""
    reused: int = 0
    """Number of leading positions that others had computed"""
    tree: tuple[int, ...] = ()
    """Parent index of each of the last tokens among them, always smaller than its own; -1: the line before them"""
    encoder_input: EncoderInput | None = None
    """The text that an encoder-decoder's decoder attends to beside the sequence"""
    state: Any = None
    """In models with states, where they are (`cache/states.py`)"""
    probe: Any = None
    """The hooks of the request that it belongs to (`runner/model_hooks.py`); None: nobody looks inside the model"""
    first_parts: tuple[int, ...] = ()
    """Per group of layers with a window (`cache/windows.py`), the first page that it keeps there; empty: all"""
    unseen: int = 0
    """Last tokens of an encoder's text that attend to those before them, and to which no token attends"""

    @property
    def pending(self) -> int:
        """Number of tokens not yet computed."""
        return len(self.token_ids) - self.cached

    @property
    def line(self) -> int:
        """Number of cached positions that are not in a tree."""
        return min(self.cached, len(self.token_ids) - len(self.tree))


class Span(NamedTuple):
    """One sequence's part of a batch, in Python integers for loops on the host."""

    start: int
    """Its first row in the flat arrays."""
    stop: int
    context_len: int
    """S: cached and new positions."""
    text_len: int
    """Context length including the tokens of later chunks."""
    pages: tuple[int, ...]
    tree: NDArray[np.bool_] | None = None
    """[m, m] attention mask, if the last m tokens are a tree: True if the row's token sees the column's"""
    beyond: int = 0
    """Positions from the end of the context to the end of these rows: rows that no token attends to follow it"""

    def positions(self) -> IntArray:
        """Positions of the new tokens, from 0. [n]"""
        positions = np.arange(self.context_len - (self.stop - self.start), self.context_len) + self.beyond
        return positions if self.tree is None else self._with_tree(positions)

    def key_positions(self) -> IntArray:
        """Positions of the cached and new tokens. [S]"""
        positions = np.arange(self.context_len)
        return positions if self.tree is None else self._with_tree(positions)

    def _with_tree(self, positions: IntArray) -> IntArray:
        """Set the positions of a tree's tokens: each follows the line by its number of ancestors."""
        assert self.tree is not None
        m = len(self.tree)
        positions[-m:] = self.context_len - m - 1 + self.tree.sum(axis=1)
        return positions


@dataclass(frozen=True, eq=False)
class Batch:
    """A ragged batch of N sequences with T new tokens in all."""

    token_ids: IntArray
    """[T]"""
    positions: IntArray
    """[T], from 0; in a tree several tokens share a position"""
    slot_pages: IntArray
    """[T]: page for each new token's K and V"""
    slot_offsets: IntArray
    """[T]: offset inside that page"""
    spans: tuple[Span, ...]
    """Each sequence's part, with its pages."""
    types: IntArray | None = field(default=None, kw_only=True)
    """[T], token types; None in models without"""
    adapters: tuple[str | None, ...] = field(default=(), kw_only=True)
    """Each sequence's LoRA adapter; empty if none has one"""
    state_before: IntArray | None = field(default=None, kw_only=True)
    """[T], by which each token finds the state before it (`reference/convolution.py`); None in models without states"""
    state_after: IntArray | None = field(default=None, kw_only=True)
    """[T], the slot for the state after each token, or -1"""
    frames: Any = field(default=None, kw_only=True)
    """[2 T, M], in place of the token ids if an encoder reads sound"""
    cross_rows: tuple[Span, ...] = field(default=(), kw_only=True)
    """The same rows, with the pages of each sequence's source, fully visible to them; empty without an encoder"""
    group: int = field(default=0, kw_only=True)
    """Number of the group of layers whose pages the batch has (`ModelConfig.kv_groups`)"""
    groups: Mapping[int, "Batch"] = field(default_factory=dict, kw_only=True)
    """The batch with the pages of other groups, by their numbers; a group that is missing has the same pages"""

    @cached_property
    def over_sources(self) -> "Batch":
        """The batch as cross-attention sees it."""
        return replace(self, spans=self.cross_rows, cross_rows=())

    @cached_property
    def by_source(self) -> "Batch":
        """The same, adjacent sequences with one source, such as beams, as one: its keys are then read once."""
        spans: list[Span] = []
        for span in self.cross_rows:
            if spans and span.pages == spans[-1].pages:
                spans[-1] = spans[-1]._replace(stop=span.stop)
            else:
                spans.append(span)
        return replace(self, spans=tuple(spans), cross_rows=())

    def in_group(self, group: int) -> "Batch":
        """The batch with the pages of a group of layers."""
        return self.groups.get(group, self)

    @property
    def num_tokens(self) -> int:
        """T"""
        return len(self.token_ids)

    @property
    def has_tree(self) -> bool:
        """True if any sequence ends in a tree."""
        return any(span.tree is not None for span in self.spans)

    def visible_pairs(self, window: int | None = None, *, causal: bool = True) -> int:
        """Pairs of a query and a key that it sees: p + 1 at position (or tree depth) p, at most the window.

        If not causal, all of the context, or what is within the window on either side.
        """
        pairs = 0
        for span in self.spans:
            at, S = span.positions(), span.context_len
            first = 0 if window is None else np.maximum(at - window + 1, 0)
            last = at + 1 if causal else S if window is None else np.minimum(at + window, S)
            pairs += int(np.broadcast_to(last - first, at.shape).sum())
        return pairs

    def reach(self, window: int | None = None) -> int:
        """Positions that at least one new token of their sequence sees."""
        return sum(
            span.context_len if window is None else min(span.context_len, window - 1 + span.stop - span.start)
            for span in self.spans
        )

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], counts: Sequence[int], page_size: int) -> "Batch":
        """The batch that computes the next `counts[i]` pending tokens of each sequence.

        The cache must have allocated their pages (`PagedCache.reserve`).
        """
        token_ids: list[int] = []
        spans: list[Span] = []
        cross_rows: list[Span] = []
        positions: list[int] = []  # Python lists: faster than NumPy calls for a few tokens
        slot_pages: list[int] = []
        slot_offsets: list[int] = []
        types: list[int] = []
        has_tree = False
        adapters: list[str | None] = []
        for sequence, count in zip(sequences, counts, strict=True):
            start, context_len, pages = len(token_ids), sequence.cached + count, sequence.pages
            token_ids += sequence.token_ids[sequence.cached : context_len]
            types += sequence.types[sequence.cached : context_len]
            after = len(sequence.token_ids) - context_len
            assert not 0 < after < len(sequence.tree)  # a tree is computed in one pass
            tree = ancestors(sequence.tree) if sequence.tree and not after else None
            has_tree = has_tree or tree is not None
            stop, seen = len(token_ids) - sequence.unseen, context_len - sequence.unseen
            spans.append(Span(start, stop, seen, len(sequence.token_ids), tuple(pages), tree))
            if sequence.unseen:
                spans.append(spans[-1]._replace(start=stop, stop=len(token_ids), beyond=sequence.unseen))
            adapters += [sequence.adapter] * (2 if sequence.unseen else 1)
            if sequence.encoder_input is not None:
                cross_rows.append(Span(start, len(token_ids), *sequence.encoder_input.extent))
            places = range(sequence.cached, context_len)
            positions += places
            slot_pages += [pages[place // page_size] for place in places]
            slot_offsets += [place % page_size for place in places]
        tokens = np.array([token_ids, positions, slot_pages, slot_offsets], np.int64)  # [4, T]: one call, four arrays
        if has_tree:
            tokens[1] = np.concatenate([span.positions() for span in spans])
        return cls(
            *(tokens[0], tokens[1], tokens[2], tokens[3]),
            tuple(spans),
            adapters=tuple(adapters) if any(adapters) else (),
            cross_rows=tuple(cross_rows),
            types=np.array(types, np.int64) if types else None,
        )


def ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Attention mask of a tree: each token sees itself and its ancestors. [m] -> [m, m]"""
    seen = np.eye(len(parents), dtype=np.bool_)
    for i, parent in enumerate(parents):
        assert parent < i
        if parent >= 0:
            seen[i] |= seen[parent]
    return seen


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two lists of tokens, or two tuples."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # binary search: comparing slices is fast, comparing one by one is not
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
