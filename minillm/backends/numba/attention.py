"""Attention over the paged cache and storing in it: which kernel takes which sequence of a batch.

Sequences that bring few query rows (decode, short guesses) go to `attention_rows`, the others to `attention_tiles`.
Both work on the cache as it lies, in any of its dtypes, and know trees, windows and ALiBi.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from ...batch import Batch, Span
from . import attention_rows, attention_tiles
from .cachedtypes import StoredVectors
from .compiling import kernel
from .elementary import row_of, store_vector, with_whole_rows

MOST_ROWS = 8
"""Query rows (new tokens x query heads of a K/V head) up to which `attention_rows` is the faster one."""

_FLOAT = types.float32
_INDICES, _POSITIONS = types.Array(types.int64, 2, "C"), types.Array(types.int64, 1, "C")


class Attention:
    """Runs `attend`; keeps the memory that it needs, and how a batch is cut up, from call to call."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._plans: dict[tuple[tuple[int, ...], int, int | None], _Plan] = {}
        self._memory = np.empty(0, np.float32)

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
        """Attention of every sequence of a ragged batch, as `ops.attend` defines it.

        Args:
            q: queries [T, H, D]; rows may lie apart
            keys: this layer's pages [pages, K, P, D]: float32, or `StoredVectors`
            values: likewise
            batch: which rows belong to which sequence, and its pages
            scale: 1 / sqrt D, or what the family uses instead
            out: [T, H, D], filled and returned
            window: how many positions a query sees, its own included; None: all before it
            slopes: [H], ALiBi's; None: no key loses anything
        """
        dtype, keys, values = _parts(keys, values)
        plan, q = self._plan_of(batch, q.shape, keys[0].shape[1], window), with_whole_rows(q)
        windowed, biased = window is not None, slopes is not None
        if plan.pieces:
            run = _rows_kernel(dtype, windowed, biased)
            run(q, keys, values, plan.pieces, scale, window, slopes, plan.parts, plan.rows_scratch, out)
        if plan.tiles:
            run = _tiles_kernel(dtype, windowed, biased)
            run(q, keys, values, plan.tiles, scale, window, slopes, plan.tiles_scratch, out)
        return out

    def _plan_of(self, batch: Batch, shape: tuple[int, ...], K: int, window: int | None) -> "_Plan":
        """Made for a batch's first layer, and kept for the others that are alike."""
        if batch is not self._batch:
            self._batch, self._plans = batch, {}
        key = shape, K, window
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _Plan(batch, (shape[1], K, shape[2]), window, self._take)
        return plan

    def _take(self, *shapes: tuple[int, int]) -> list[NDArray[np.float32]]:
        """Arrays that may be overwritten, one after the other in memory that only grows."""
        sizes = [rows * columns for rows, columns in shapes]
        if len(self._memory) < sum(sizes):
            self._memory = np.empty(sum(sizes), np.float32)
        stops = np.cumsum(sizes)
        return [
            self._memory[stop - size : stop].reshape(shape)
            for stop, size, shape in zip(stops, sizes, shapes, strict=True)
        ]


class _Plan:
    """How a batch is cut up, in the arrays that kernels read; and the memory that they work in."""

    def __init__(
        self,
        batch: Batch,
        heads: tuple[int, int, int],
        window: int | None,
        take: Callable[..., list[NDArray[np.float32]]],
    ) -> None:
        H, K, D = heads
        tables = np.zeros((len(batch.spans), max((len(s.pages) for s in batch.spans), default=0)), np.int64)
        spans, pieces, tiles, seen = [], [], [], [np.empty(0, np.bool_)]
        slots = masked = 0
        for i, span in enumerate(batch.spans):
            n = span.stop - span.start
            tables[i, : len(span.pages)] = span.pages
            m = 0 if span.tree is None else len(span.tree)
            spans.append((span.start, n, span.context_len, m, masked))
            if span.tree is not None:
                seen.append(_branches(span.tree, window).reshape(-1))
                masked += m * m
            if n * H // K <= MOST_ROWS:
                chunks = chunks_in_reach(span, window)
                for chunk in chunks:
                    pieces.append((i, chunk, slots, len(chunks) if chunk == chunks.start else 0))
                    slots += n * H
            else:
                tiles += [(i, row) for row in range(0, n * H // K, attention_tiles.LANES)]
        shared = tables, np.array(spans, np.int64).reshape(-1, 5), np.concatenate(seen), batch.positions
        self.pieces = (*shared, np.array(pieces)) if pieces else None
        self.tiles = (*shared, np.array(tiles)) if tiles else None
        workers = numba.get_num_threads()
        self.parts, self.rows_scratch = take((slots, D + 2), (workers, attention_rows.scratch_size(MOST_ROWS, D)))
        (self.tiles_scratch,) = take((workers, attention_tiles.scratch_size(D)))


def chunks_in_reach(span: Span, window: int | None) -> range:
    """The chunks of a sequence's cache that some of its queries reach."""
    earliest = span.context_len - (span.stop - span.start)  # of the queries' positions, in a tree too
    first = 0 if window is None else max(0, earliest - window + 1)
    return range(first // attention_rows.CHUNK, -(-span.context_len // attention_rows.CHUNK))


def _branches(tree: NDArray[np.bool_], window: int | None) -> NDArray[np.bool_]:
    """Which tokens of a tree see which, where they also have to lie within the window. [m, m]"""
    depths = tree.sum(axis=1)  # [m, m] -> [m]
    return tree if window is None else tree & (depths[:, None] - depths < window)


def store_kv(k: NDArray[np.float32], v: NDArray[np.float32], keys: Any, values: Any, batch: Batch) -> None:
    """Round each token's key and value to the cache's dtype and write them into their slots.

    Args:
        k: [T, K, D]; rows may lie apart
        v: likewise
        keys: this layer's pages [pages, K, P, D], changed in place: float32, or `StoredVectors`
        values: likewise
        batch: the slots
    """
    dtype, keys, values = _parts(keys, values)
    _store_kernel(dtype)(with_whole_rows(k), with_whole_rows(v), keys, values, batch.slot_pages, batch.slot_offsets)


def _parts(keys: Any, values: Any) -> Any:
    """The type of the numbers by its NumPy name; then of keys and of values the array and its scales."""
    if isinstance(keys, StoredVectors):
        return keys.data.dtype.name, (keys.data, keys.scales), (values.data, values.scales)
    return "float32", (keys, None), (values, None)


def _pages(dtype: str) -> tuple[Any, Any]:
    """Types of an array of pages and of its scales."""
    element = getattr(types, dtype)
    return types.Array(element, 4, "C"), types.Array(_FLOAT, 3, "C") if dtype == "int8" else types.none


def _signature(dtype: str, windowed: bool, biased: bool, *scratch: Any) -> Any:
    """Without a window or slopes these are None, and compiled away."""
    pages = types.Tuple(_pages(dtype))
    plan = types.Tuple((_INDICES, _INDICES, types.Array(types.boolean, 1, "C"), _POSITIONS, _INDICES))
    rule = _FLOAT, types.int64 if windowed else types.none, types.Array(_FLOAT, 1, "C") if biased else types.none
    queries, out = types.Array(_FLOAT, 3, "A"), types.Array(_FLOAT, 3, "C")
    return types.void(queries, pages, pages, plan, *rule, *scratch, out)


@cache
def _rows_kernel(dtype: str, windowed: bool, biased: bool) -> Any:
    scratch = types.Array(_FLOAT, 2, "C")
    return kernel(_signature(dtype, windowed, biased, scratch, scratch), parallel=True)(attention_rows.attend_rows)


@cache
def _tiles_kernel(dtype: str, windowed: bool, biased: bool) -> Any:
    signature = _signature(dtype, windowed, biased, types.Array(_FLOAT, 2, "C"))
    return kernel(signature, parallel=True)(attention_tiles.attend_tiles)


@cache
def _store_kernel(dtype: str) -> Any:
    rows, indices = types.Array(_FLOAT, 3, "A"), _POSITIONS
    pages = types.Tuple(_pages(dtype))
    return kernel(types.void(rows, rows, pages, pages, indices, indices))(_store)


def _store(k: Any, v: Any, keys: Any, values: Any, slot_pages: Any, slot_offsets: Any) -> None:
    K, D = k.shape[1:]
    for t in range(len(slot_pages)):
        page, offset = slot_pages[t], slot_offsets[t]
        key, value = row_of(k, t), row_of(v, t)
        for head in range(K):
            store_vector(key[head * D : head * D + D], keys, page, head, offset)
            store_vector(value[head * D : head * D + D], values, page, head, offset)
