"""Attention over the paged cache, and storing in it: selects a kernel for each sequence of a batch.

Sequences with few query rows (decode, short guesses) go to `attention_rows`, the others to `attention_tiles`. Both read
the cache in place, in any of its dtypes, and support trees, windows and ALiBi.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from ...batch import Batch, Span
from ..pages import StoredVectors
from . import attention_rows, attention_tiles
from .arguments import as_numbers, row_at, share_of, stored_vectors, vector
from .compiling import num_threads, shared_kernel
from .elementary import store_vector
from .launching import launch, most_shares, not_recorded, rows_of
from .rows import shares_of_rows
from .workspace import work

MOST_ROWS = 16
"""Query rows (new tokens x query heads of a K/V head) up to which `attention_rows` takes a sequence: at 16 both kernels
take about as long, and a pass with this one can be recorded."""

_FLOAT = types.float32
_NO_SLOPES, _NO_SCALES = np.empty(0, np.float32), np.empty((0, 0, 0), np.float32)
_NO_WINDOW = 1 << 62


class Attention:
    """Runs `attend`; keeps the plans of a batch from call to call."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int | None, ...], _Plan] = {}

    def refill(self, batch: Batch) -> None:
        """Update what a recorded step reads for its next batch, which is split like the one before."""
        for plan in self._plans.values():
            plan.fill(batch)

    def attend(
        self,
        q: NDArray[np.float32],
        keys: Any,
        values: Any,
        batch: Batch,
        scale: float,
        out: NDArray[np.float32],
        *,
        window: int | None = None,
        slopes: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Attention of every sequence of a ragged batch, as `reference.attend` defines it.

        Args:
            q: queries [T, H, D]; any row stride
            keys: this layer's pages [pages, K, P, D]: float32, or `StoredVectors`
            values: likewise
            batch: which rows belong to which sequence, and its pages
            scale: 1 / sqrt D, or what the family uses instead
            out: [T, H, D], filled and returned
            window: number of positions a query sees, its own included; None: all before it
            slopes: [H], ALiBi's; None: no bias
        """
        H, D, K = *q.shape[1:], keys.shape[1]
        plan = self._plan_of(batch, H, D, K, window)
        stored = _parts(keys, values)
        bias, reach = _NO_SLOPES if slopes is None else slopes, _NO_WINDOW if window is None else window
        before = *stored, rows_of(q), float(scale), reach, bias
        if plan.pieces:
            arguments = *before, plan.state, plan.scratch, rows_of(out)
            launch(_rows_kernel(stored[0].dtype), *arguments, shares=most_shares())  # their number grows later
            launch(_merge_kernel(), *arguments, shares=shares_of_rows(out))
        if plan.tiles is not None:
            not_recorded()
            scratch = work.rows("attention", num_threads(), attention_tiles.scratch_size(D), np.float32)
            arguments = *before, *plan.shared, plan.tiles, scratch, rows_of(out)
            launch(_tiles_kernel(stored[0].dtype), *arguments, shares=len(plan.tiles) * K)
        return out

    def _plan_of(self, batch: Batch, H: int, D: int, K: int, window: int | None) -> "_Plan":
        """The plan of a batch, filled in its first layer and kept for other layers of the same shape."""
        key = H, D, K, window, num_threads()
        if key not in self._plans:
            self._plans[key] = _Plan(H, D, K, window)
        plan = self._plans[key]
        if plan.batch is not batch:
            plan.fill(batch)
        return plan


class _Plan:
    """The split of a batch, in the arrays that kernels read, and their scratch memory."""

    def __init__(self, H: int, D: int, K: int, window: int | None) -> None:
        self.batch: Batch | None = None
        self.state = np.zeros(20, np.int64)
        """The plan argument of `attention_rows`: addresses and shapes of the arrays"""
        self.scratch = np.empty((num_threads(), attention_rows.scratch_size(MOST_ROWS, D)), np.float32)
        self._heads = H, K
        self._window = window
        self.pieces = 0
        self.tiles: NDArray[np.int64] | None = None
        self._cut: Any = None
        self._tables, self._spans, self._pieces = (np.zeros((0, width), np.int64) for width in (0, 5, 4))
        self._seen, self._positions = np.zeros(0, np.bool_), np.zeros(0, np.int64)
        self._parts = np.empty((0, D + 2), np.float32)

    def fill(self, batch: Batch) -> None:
        """Split a batch. Unchanged arrays are not rewritten: in most decode steps only lengths change."""
        self.batch, (H, K) = batch, self._heads
        spans, pieces, tiles, seen = [], [], [], []
        slots = masked = 0
        for i, span in enumerate(batch.spans):
            n = span.stop - span.start
            m = 0 if span.tree is None else len(span.tree)
            spans.append((span.start, n, span.context_len, m, masked))
            if span.tree is not None:
                seen.append(_branches(span.tree, self._window).reshape(-1))
                masked += m * m
            if n * H // K <= MOST_ROWS:
                chunks = chunks_in_reach(span, self._window)
                for chunk in chunks:
                    pieces.append((i, chunk, slots, len(chunks) if chunk == chunks.start else 0))
                    slots += n * H
            else:
                tiles += [(i, row) for row in range(0, n * H // K, attention_tiles.LANES)]
        cut = batch.num_tokens, [span.pages for span in batch.spans], pieces, tiles, slots, masked
        if cut != self._cut:
            self._cut = cut
            self._write(*cut)
        self._positions[: batch.num_tokens] = batch.positions
        if spans:
            self._spans[: len(spans)] = spans
        if masked:
            self._seen[:masked] = np.concatenate(seen)

    def _write(self, T: int, tables: Any, pieces: Any, tiles: Any, slots: int, masked: int) -> None:
        """Write the arrays that stay the same from step to step until a sequence reaches a new page or chunk."""
        if self._grow(T, tables, len(pieces), slots, masked):
            arrays = self._tables, self._spans, self._seen, self._positions, self._pieces, self._parts
            self.state[:] = as_numbers(arrays)
        self.pieces = self.state[13] = len(pieces)
        self.tiles = np.array(tiles) if tiles else None
        for row, pages in zip(self._tables, tables, strict=False):
            row[: len(pages)] = pages
        if pieces:
            self._pieces[: len(pieces)] = pieces

    def _grow(self, T: int, tables: Any, pieces: int, slots: int, masked: int) -> bool:
        """Reallocate if an array is too small, with room to grow, so that addresses seldom change. -> whether it did"""
        N, most = len(tables), max(map(len, tables), default=0)
        if (
            len(self._tables) >= N
            and most <= self._tables.shape[1]
            and len(self._positions) >= T
            and pieces <= len(self._pieces)
            and masked <= len(self._seen)
            and slots <= len(self._parts)
        ):
            return False
        self._tables, self._spans = np.zeros((N, 2 * most), np.int64), np.zeros((N, 5), np.int64)
        self._pieces, self._positions = np.zeros((2 * pieces, 4), np.int64), np.zeros(T, np.int64)
        self._seen, self._parts = (
            np.zeros(2 * masked, np.bool_),
            np.empty((2 * slots, self._parts.shape[1]), np.float32),
        )
        return True

    @property
    def shared(self) -> tuple[NDArray[Any], ...]:
        """The arrays that all kernels read: block tables, spans, trees' masks, positions."""
        return self._tables, self._spans, self._seen, self._positions


def chunks_in_reach(span: Span, window: int | None) -> range:
    """The chunks of a sequence's cache that any of its queries sees."""
    earliest = span.context_len - (span.stop - span.start)  # of the queries' positions, in a tree too
    first = 0 if window is None else max(0, earliest - window + 1)
    return range(first // attention_rows.CHUNK, -(-span.context_len // attention_rows.CHUNK))


def _branches(tree: NDArray[np.bool_], window: int | None) -> NDArray[np.bool_]:
    """The mask of a tree, restricted to the window. [m, m]"""
    depths = tree.sum(axis=1)  # [m, m] -> [m]
    return tree if window is None else tree & (depths[:, None] - depths < window)


def store_kv(k: NDArray[np.float32], v: NDArray[np.float32], keys: Any, values: Any, batch: Batch) -> None:
    """Round each token's key and value to the cache's dtype and write them into their slots.

    Args:
        k: [T, K, D]; any row stride
        v: likewise
        keys: this layer's pages [pages, K, P, D], changed in place: float32, or `StoredVectors`
        values: likewise
        batch: the slots
    """
    stored = _parts(keys, values)
    launch(
        _store_kernel(stored[0].dtype), *stored, rows_of(k), rows_of(v), batch.slot_pages, batch.slot_offsets,
        shares=shares_of_rows(k),
    )  # fmt: skip


def _parts(keys: Any, values: Any) -> Any:
    """Keys and values, and the scales of each, empty if there are none."""
    if isinstance(keys, StoredVectors):
        scales = (_NO_SCALES if side.scales is None else side.scales for side in (keys, values))
        return keys.data, values.data, *scales
    return keys, values, _NO_SCALES, _NO_SCALES


@cache
def _rows_kernel(dtype: np.dtype[Any]) -> int:
    return shared_kernel(getattr(types, dtype.name))(attention_rows.attend_pieces)


@cache
def _merge_kernel() -> int:
    return shared_kernel(_FLOAT)(attention_rows.merge_pieces)


@cache
def _tiles_kernel(dtype: np.dtype[Any]) -> int:
    return shared_kernel(getattr(types, dtype.name))(attention_tiles.attend_tiles)


@cache
def _store_kernel(dtype: np.dtype[Any]) -> int:
    return shared_kernel(getattr(types, dtype.name))(_store)


def _store(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """Store a share of the tokens. Arguments: keys, values, scales of each; k and v [T, K D]; pages and offsets [T]."""
    keys, values = stored_vectors(arguments, 0, 12, data), stored_vectors(arguments, 6, 17, data)
    slot_pages, slot_offsets = vector(arguments, 30, np.int64), vector(arguments, 32, np.int64)
    K, D = keys[0].shape[1], keys[0].shape[3]
    first, stop = share_of(len(slot_pages), share, shares)
    for t in range(first, stop):
        page, offset = slot_pages[t], slot_offsets[t]
        key, value = row_at(arguments, 22, t), row_at(arguments, 26, t)
        for head in range(K):
            store_vector(key[head * D : head * D + D], keys, page, head, offset)
            store_vector(value[head * D : head * D + D], values, page, head, offset)
