"""A batch on the device: the arrays that kernels read, sent in one copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...batch import BEGINNING, NO_SLOT, Batch, Span
from ..recording import DecodeStep
from .attention import Trees, count_singles
from .device import Device, StagingBuffer
from .kernels import Kernels

LEAST_PAGES = 16
"""The fewest columns of a block table; larger ones are a power of two, so that there are few shapes."""

SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of sequences that decode steps are padded to, the next one up; beyond, powers of two. Between 16 and 128
there are two for each doubling: products and attention of 33 sequences would cost as much as of 64."""

TOKENS = (16, 32, 64, 96, *range(128, 577, 64))
"""Numbers of rows that recorded passes of prompts are padded to, the next one up. The last one has room for
`CudaMemory.max_batched_tokens` beside what decoding sequences are padded by."""

VERIFIED = (8, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of rows that recorded passes are padded to in which all rows' logits are wanted"""
MOST_VERIFIED = VERIFIED[-1]
"""Products of more rows are the library's"""

NOBODY: Mapping[str, int] = MappingProxyType({})
"""Numbers of adapters where there are none"""


class Bucket(NamedTuple):
    """The shape that passes of about the same size are padded to."""

    sequences: int
    """Its number of rows too in decode steps; and of rows of logits, unless `rows` says so"""
    pages: int
    """Columns of the block table"""
    adapters: int = 0
    """Number of LoRA adapters with numbers; 0 for steps in which no sequence has one"""
    tokens: int = 0
    """Number of rows of a pass of prompts; 0: a decode step"""
    singles: int = 0
    """In a pass of prompts the first rows and sequences, those that decode, padding included"""
    source_pages: int = 0
    """Columns of the block table of the sources; 0 without an encoder"""
    rows: int = 0
    """Number of rows of logits where those of all tokens are wanted, as of guesses that are verified"""
    words: int = 0
    """Number of words that say which nodes of a tree a row sees (`Trees`); 0 without trees"""

    @property
    def logits(self) -> int:
        """Number of rows of logits."""
        return self.rows or self.sequences


class Layout(NamedTuple):
    """The rows of a padded batch, and its sequences: those that decode, padding, those of prompts, padding.

    Of the padding after them the first sequence has all rows, none of which sees anything or is stored.
    """

    singles: int
    """Sequences that decode"""
    padded_singles: int
    tokens: int
    """All rows"""
    sequences: int

    @classmethod
    def of(cls, batch: Batch, bucket: Bucket | None) -> "Layout":
        """The layout of a batch, padded to a bucket if one is given."""
        N = len(batch.spans)
        if bucket is None:
            return cls(0, 0, batch.num_tokens, N)
        if not bucket.tokens:
            return cls(N, bucket.sequences, bucket.sequences, bucket.sequences)
        return cls(singles_of(batch) if bucket.singles else 0, bucket.singles, bucket.tokens, bucket.sequences)

    @property
    def shift(self) -> int:
        """Places by which rows and sequences of prompts move."""
        return self.padded_singles - self.singles

    def spread(self, padded: NDArray[Any], values: Any, padding: int) -> None:
        """Write values, of rows or of sequences, to their places."""
        stop = len(values) + self.shift
        padded[: self.singles] = values[: self.singles]
        padded[self.singles : self.padded_singles] = padding
        padded[self.padded_singles : stop] = values[self.singles :]
        padded[stop:] = padding

    def computed(self, tokens: int) -> tuple[slice, ...]:
        """The rows of a batch of so many tokens, without padding."""
        rows = slice(self.singles), slice(self.padded_singles, tokens + self.shift)
        return tuple(part for part in rows if part.stop > (part.start or 0))

    def place(self, i: int) -> int:
        """The place of a row or sequence."""
        return i if i < self.singles else i + self.shift


@dataclass(frozen=True, eq=False)
class DeviceBatch(Batch):
    """A batch whose arrays are int32 on the device; `spans` stays on the host.

    A padded token has slot -1, and a padded sequence context_lens and text_lens 0 and no span.
    """

    query_starts: Any
    """[N + 1]: sequence i owns the rows query_starts[i] : query_starts[i + 1]"""
    context_lens: Any
    """[N]: S of each sequence, its new tokens included"""
    text_lens: Any
    """[N]: the same, with the tokens of later prefill chunks included"""
    slots: Any
    """[T]: page * P + offset of each new token's K and V"""
    block_table: Any
    """[N, B]"""
    max_queries: int
    """The most new tokens of one sequence, or an upper bound"""
    singles: int
    """Number of the first sequences, each of which has one new token, of a batch with others after them"""
    trees: Trees | None = None
    """Which tokens of trees of guesses see each other, where some sequence ends in one"""
    source_lens: Any = None
    """[N]: S of each sequence's source; None without an encoder"""
    source_table: Any = None
    """[N, B'], likewise"""
    row_adapters: Any = None
    """[T]: the number of each row's LoRA adapter, or -1, in decode steps where some sequence has one"""

    @cached_property
    def over_sources(self) -> "DeviceBatch":
        """As of `Batch`."""
        return replace(
            self,
            spans=self.cross_rows,
            cross_rows=(),
            context_lens=self.source_lens,
            block_table=self.source_table,
            trees=None,
        )


class BatchBuffers:
    """Reusable memory for one batch at a time."""

    def __init__(self, device: Device) -> None:
        self._device, self._staging = device, StagingBuffer(device)
        self._pages: dict[int, list[tuple[int, ...]]] = {}  # by group, what each row of its block table holds
        self._shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self._staging.nbytes

    def fill(
        self,
        batch: Batch,
        rows: Any,
        page_size: int,
        bucket: Bucket | None = None,
        numbers: Mapping[str, int] = NOBODY,
    ) -> tuple[DeviceBatch, Any]:
        """Send a batch and its rows [R] that are wanted, padded to a bucket if one is given; `numbers` of adapters."""
        layout, R = Layout.of(batch, bucket), len(rows)
        padded_R = R if bucket is None else bucket.logits
        B = pages_of(batch.spans) if bucket is None else bucket.pages
        adapted = bucket is not None and bucket.adapters > 0
        groups = tuple(batch.groups)
        words = tree_words(batch.spans) if bucket is None else bucket.words
        source_pages = bucket.source_pages if bucket else pages_of(batch.cross_rows) if batch.cross_rows else 0
        parts = {"types": batch.types is not None, "adapted": adapted, "states": batch.state_before is not None}
        self._lay_out(
            layout.tokens, layout.sequences, padded_R, B, groups, words=words, source_pages=source_pages, **parts
        )
        host = self._staging.host
        if adapted:
            layout.spread(host["adapters"], numbers_of(batch.adapters, numbers), -1)
        if batch.types is not None:
            layout.spread(host["types"], batch.types, 0)
        if batch.state_before is not None:
            layout.spread(host["state_before"], batch.state_before, BEGINNING)
            layout.spread(host["state_after"], batch.state_after, NO_SLOT)
        layout.spread(host["token_ids"], batch.token_ids, 0)
        layout.spread(host["positions"], batch.positions, 0)
        for group in (batch, *batch.groups.values()):
            layout.spread(host[_name("slots", group.group)], group.slot_pages * page_size + group.slot_offsets, -1)
            self._fill_table(group, layout)
        layout.spread(host["context_lens"], [span.context_len for span in batch.spans], 0)
        layout.spread(host["text_lens"], [span.text_len for span in batch.spans], 0)
        self._fill_starts(batch, layout)
        host["rows"][:R] = [layout.place(row) for row in rows] if layout.shift else rows
        host["rows"][R:] = np.arange(R, padded_R)
        if source_pages:
            assert len(batch.cross_rows) == len(batch.spans), "each sequence has a source"
            layout.spread(host["source_lens"], [span.context_len for span in batch.cross_rows], 0)
            for i, span in enumerate(batch.cross_rows):
                host["source_table"][layout.place(i), : len(span.pages)] = span.pages
        if words:
            host["tree_seen"][...], host["tree_sizes"][...] = 0, 0
            for i, span in enumerate(batch.spans):
                if span.tree is not None:
                    host["tree_sizes"][i] = len(span.tree)
                    fill_tree(host["tree_seen"][span.start : span.stop], span.tree)
        self._staging.send()
        there = self._staging.there
        names = ("token_ids", "positions", "query_starts", "context_lens", "text_lens")
        padded = bucket is not None and bucket.tokens > 0
        sent = DeviceBatch(
            **{name: there[name] for name in names},
            slot_pages=batch.slot_pages,
            slot_offsets=batch.slot_offsets,
            spans=batch.spans,
            cross_rows=batch.cross_rows,
            slots=there["slots"],
            block_table=there["block_table"],
            max_queries=layout.tokens if padded else max(span.stop - span.start for span in batch.spans),
            singles=layout.padded_singles if padded else singles_of(batch),
            types=None if batch.types is None else there["types"],
            frames=None if batch.frames is None else self._device.xp.asarray(batch.frames),
            state_before=None if batch.state_before is None else there["state_before"],
            state_after=None if batch.state_after is None else there["state_after"],
            trees=Trees(there["tree_seen"], there["tree_sizes"]) if words else None,
            source_lens=there.get("source_lens") if source_pages else None,
            source_table=there.get("source_table") if source_pages else None,
            row_adapters=there["adapters"] if adapted else None,
        )
        return replace(sent, groups={group: self._in_group(sent, batch, group) for group in groups}), there["rows"]

    def _fill_starts(self, batch: Batch, layout: Layout) -> None:
        """Write each sequence's first row, and the number of rows."""
        starts, first = self._staging.host["query_starts"], layout.padded_singles
        starts[:first] = np.arange(first)
        spans = batch.spans[layout.singles :]
        starts[first : first + len(spans)] = [span.start + layout.shift for span in spans]
        starts[first + len(spans)] = batch.num_tokens + layout.shift
        starts[first + len(spans) + 1 :] = layout.tokens

    def _fill_table(self, batch: Batch, layout: Layout) -> None:
        """Write the rows of a group's block table that have changed."""
        table, rows = self._staging.host[_name("block_table", batch.group)], self._pages[batch.group]
        for i, span in zip(map(layout.place, range(len(batch.spans))), batch.spans, strict=True):
            if rows[i] != span.pages:
                table[i, : len(span.pages)] = span.pages
                rows[i] = span.pages

    def _in_group(self, sent: DeviceBatch, batch: Batch, group: int) -> DeviceBatch:
        """A batch on the device with the pages of another group of layers."""
        own, there = batch.groups[group], self._staging.there
        slots, table = (there[_name(array, group)] for array in ("slots", "block_table"))
        return replace(sent, slot_pages=own.slot_pages, spans=own.spans, group=group, slots=slots, block_table=table)

    def fill_step(self, step: DecodeStep, page_size: int, bucket: Bucket, numbers: Mapping[str, int] = NOBODY) -> Any:
        """Send a decode step; `numbers` of adapters. Returns its token ids on the device, [N]."""
        N, padded = len(step.positions), bucket.sequences
        self._lay_out(padded, padded, padded, bucket.pages, tuple(step.tables), adapted=bucket.adapters > 0)
        host, B = self._staging.host, min(bucket.pages, step.pages.shape[1])
        if bucket.adapters:
            host["adapters"][:N], host["adapters"][N:] = numbers_of(step.adapters, numbers), -1
        host["token_ids"][:N], host["token_ids"][N:] = step.token_ids, 0
        host["positions"][:N], host["positions"][N:] = step.positions, 0
        for group, pages in ((0, step.pages), *step.tables.items()):
            current = pages[np.arange(N), step.positions // page_size]  # [N, B] -> [N]
            slots = host[_name("slots", group)]
            slots[:N], slots[N:] = current * page_size + step.positions % page_size, -1
            host[_name("block_table", group)][:N, :B] = pages[:, :B]
            self._pages[group] = [()] * padded  # `fill` writes them anew
        host["query_starts"][:] = np.arange(padded + 1)
        host["context_lens"][:N], host["context_lens"][N:] = step.positions + 1, 0
        host["text_lens"][:] = host["context_lens"]
        host["rows"][:] = np.arange(padded)
        self._staging.send()
        return self._staging.there["token_ids"][:N]

    def _lay_out(
        self,
        T: int,
        N: int,
        R: int,
        B: int,
        groups: tuple[int, ...],
        *,
        types: bool = False,
        adapted: bool = False,
        states: bool = False,
        words: int = 0,
        source_pages: int = 0,
    ) -> None:
        """Lay out the arrays.

        `words` of each row that says which nodes of a tree it sees, if there are trees; `source_pages` as of `Bucket`.
        """
        sizes = {"token_ids": T, "positions": T, "slots": T, "query_starts": N + 1, "rows": R}
        sizes |= {"context_lens": N, "text_lens": N} | ({"types": T} if types else {})
        sizes |= {"adapters": T} if adapted else {}
        sizes |= {"state_before": T, "state_after": T} if states else {}
        fields: dict[str, Any] = {name: ((size,), np.int32) for name, size in sizes.items()}
        fields |= {"tree_seen": ((T, words), np.uint32), "tree_sizes": ((N,), np.int32)} if words else {}
        if source_pages:
            fields |= {"source_lens": ((N,), np.int32), "source_table": ((N, source_pages), np.int32)}
        fields |= {_name("slots", group): ((T,), np.int32) for group in groups}
        fields |= {_name("block_table", group): ((N, B), np.int32) for group in (0, *groups)}
        self._staging.lay_out(**fields)
        if self._shape != (T, N, R, B, words, source_pages, *groups):
            self._shape = T, N, R, B, words, source_pages, *groups
            for group in (0, *groups):
                self._staging.host[_name("block_table", group)][...] = 0
                self._pages[group] = [()] * N


def tree_words(spans: Sequence[Span]) -> int:
    """Words of a row of `Trees.seen`, for the largest tree; 0 if there is none."""
    return -(-max((0 if span.tree is None else len(span.tree)) for span in spans) // 32)


def fill_tree(rows: NDArray[np.uint32], tree: NDArray[np.bool_]) -> None:
    """Write which nodes of a tree see each other, as bits.

    Args:
        rows: [n, words], a sequence's, of which the last m are the tree's; changed in place
        tree: [m, m]
    """
    m = len(tree)
    assert m <= len(rows), "a tree is computed in one pass"
    seen = np.zeros((m, 32 * rows.shape[1]), np.bool_)
    seen[:, :m] = tree
    rows[-m:] = np.packbits(seen, axis=1, bitorder="little").view("<u4")  # [m, 4 words] bytes -> [m, words]


def _name(array: str, group: int) -> str:
    """Name of the array that a group of layers reads."""
    return f"{array}.{group}" if group else array


def bucket_of(batch: Batch, rows: Any, max_batch_size: int, adapters: int = 0) -> Bucket | None:
    """The bucket of a decode step (one new token per sequence, all logits wanted); None for any other pass.

    `adapters` have numbers.
    """
    N = len(batch.spans)
    if batch.num_tokens > N or len(rows) < N or not 0 < N <= max_batch_size or batch.has_tree:
        return None
    if batch.adapters and list(rows) != [*range(N)]:  # the head's rows have the adapters of their tokens
        return None
    source_pages = pages_of(batch.cross_rows) if batch.cross_rows else 0
    numbered = adapters if batch.adapters else 0
    return Bucket(min(padded_to(N), max_batch_size), pages_of(batch.spans), numbered, source_pages=source_pages)


def bucket_of_prompts(batch: Batch, rows: Any, most: int) -> Bucket | None:
    """The bucket of a pass with prompts, or chunks of some, of at most `most` rows; None for passes without one.

    Those have adapters, states, sources, token types or sound. Where logits of more rows than sequences are wanted, or
    trees of guesses verified, it has to be a pass of up to `MOST_VERIFIED` rows, all of whose logits are.
    """
    N, others = len(batch.spans), (batch.types, batch.state_before, batch.frames)
    if not 0 < batch.num_tokens <= most or batch.adapters or batch.cross_rows:
        return None
    if any(array is not None for array in others) or any(span.beyond for span in batch.spans):
        return None
    if len(rows) > N or batch.has_tree:
        if list(rows) != [*range(batch.num_tokens)] or batch.num_tokens > MOST_VERIFIED:
            return None
        size, words = next(size for size in VERIFIED if size >= batch.num_tokens), tree_words(batch.spans)
        return Bucket(_power_of_two(N + 1), pages_of(batch.spans), tokens=size, rows=size, words=words)
    singles = singles_of(batch)
    padded = padded_to(singles) if singles else 0
    sequences = padded + _power_of_two(N - singles + 1)  # one of them has the padded rows
    least = max(padded + batch.num_tokens - singles, sequences + 1)  # all rows' logits are not wanted
    tokens = next((size for size in TOKENS if size >= least), None)
    if tokens is None:
        return None
    return Bucket(sequences, pages_of(batch.spans), 0, tokens, padded)


def singles_of(batch: Batch) -> int:
    """Number of the first sequences, each of which has one new token."""
    return count_singles(span.stop - span.start for span in batch.spans)


def bucket_of_step(step: DecodeStep, page_size: int, max_batch_size: int, adapters: int = 0) -> Bucket:
    """The bucket of a decode step of at most `max_batch_size` sequences; `adapters` have numbers."""
    N, last = len(step.positions), int(step.positions.max())
    pages = max(LEAST_PAGES, _power_of_two(last // page_size + 1))
    return Bucket(min(padded_to(N), max_batch_size), pages, adapters if step.adapters else 0)


def padded_to(sequences: int) -> int:
    """The number of sequences of a step that so many are padded to."""
    return next((size for size in SEQUENCES if size >= sequences), _power_of_two(sequences))


def numbers_of(adapters: Sequence[str | None], numbers: Mapping[str, int]) -> list[int]:
    """The number of each sequence's adapter, -1 for none."""
    return [-1 if name is None else numbers[name] for name in adapters]


def known_ids(kernels: Kernels, token_ids: Any, chosen: Any) -> None:
    """Replace ids that stand for tokens of the pass before, in place: -1 - r by `chosen[r]`.

    Args:
        kernels: of any storage type
        token_ids: [N] int32
        chosen: [R] int32, the tokens chosen by the pass before
    """
    N = len(token_ids)
    threads = min(256, -(-N // 32) * 32)
    arguments = token_ids, chosen, np.int32(N), np.int32(len(chosen))
    kernels.get("embed", "known_ids")((-(-N // threads),), (threads,), arguments)


def pages_of(spans: tuple[Span, ...]) -> int:
    """Columns of the block table of a batch."""
    return max(LEAST_PAGES, _power_of_two(max(len(span.pages) for span in spans)))


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()
