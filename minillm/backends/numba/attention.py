"""Attention over the paged cache and storing in it: which kernel takes which sequence of a batch.

Sequences that bring few query rows (decode, short guesses) go to `attention_rows`, the others to `attention_tiles`.
Both work on the cache as it lies, in any of its dtypes, and know trees.
"""

from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from ...batch import Batch
from . import attention_rows, attention_tiles
from .cachedtypes import StoredVectors
from .compiling import kernel
from .elementary import row_of, store_vector

MOST_ROWS = 8
"""Query rows (new tokens x query heads of a K/V head) up to which `attention_rows` is the faster one."""

_FLOAT = types.float32
_INDICES = types.Array(types.int64, 2, "C")


class Attention:
    """Runs `attend` and `store_kv`; keeps what they need in memory from call to call."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._plan: _Plan | None = None
        self._scratch = np.empty(0, np.float32)

    def attend(
        self, q: NDArray[np.float32], keys: Any, values: Any, batch: Batch, scale: float, out: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Attention of every sequence of a ragged batch, as `ops.attend` defines it.

        Args:
            q: queries [T, H, D]; rows may lie apart
            keys: this layer's pages [pages, K, P, D]: float32, or `StoredVectors`
            values: likewise
            batch: which rows belong to which sequence, and its pages
            scale: 1 / sqrt D, or what the family uses instead
            out: [T, H, D], filled and returned
        """
        keys, values = _stored(keys), _stored(values)
        D, G = q.shape[2], q.shape[1] // keys.shape[1]
        plan = self._plan_of(batch, q.shape[1], G)
        workers = numba.get_num_threads()
        dtype = keys.data.dtype.name
        q, k, v = with_whole_rows(q), (keys.data, keys.scales), (values.data, values.scales)
        if len(plan.pieces):
            parts, size = plan.slots * (D + 2), attention_rows.scratch_size(MOST_ROWS, D)
            memory = self._take(parts + workers * size)
            left, scratch = memory[:parts].reshape(-1, D + 2), memory[parts:].reshape(workers, size)
            _rows_kernel(dtype)(q, k, v, (*plan.sequences, plan.pieces), scale, left, scratch, out)
        if len(plan.tiles):
            size = attention_tiles.scratch_size(D)
            scratch = self._take(workers * size).reshape(workers, size)
            _tiles_kernel(dtype)(q, k, v, (*plan.sequences, plan.tiles), scale, scratch, out)
        return out

    def _plan_of(self, batch: Batch, H: int, G: int) -> "_Plan":
        """How the work is cut up: made for a batch's first layer, and kept for the others."""
        if self._batch is not batch or self._plan is None or self._plan.heads != (H, G):
            self._batch, self._plan = batch, _Plan(batch, H, G)
        return self._plan

    def _take(self, size: int) -> NDArray[np.float32]:
        if len(self._scratch) < size:
            self._scratch = np.empty(size, np.float32)
        return self._scratch[:size]


class _Plan:
    """A batch in the arrays that kernels read."""

    def __init__(self, batch: Batch, H: int, G: int) -> None:
        self.heads = H, G
        tables = np.zeros((len(batch.spans), max((len(s.pages) for s in batch.spans), default=0)), np.int64)
        spans, pieces, tiles, seen = [], [], [], [np.empty(0, np.bool_)]
        self.slots = masked = 0
        for i, span in enumerate(batch.spans):
            n = span.stop - span.start
            tables[i, : len(span.pages)] = span.pages
            m = 0 if span.tree is None else len(span.tree)
            spans.append((span.start, n, span.context_len, m, masked))
            if span.tree is not None:
                seen.append(span.tree.reshape(-1))
                masked += m * m
            if n * G <= MOST_ROWS:
                for chunk in range(-(-span.context_len // attention_rows.CHUNK)):
                    pieces.append((i, chunk, self.slots))
                    self.slots += n * H
            else:
                tiles += [(i, row) for row in range(0, n * G, attention_tiles.LANES)]
        self.sequences = tables, np.array(spans, np.int64).reshape(-1, 5), np.concatenate(seen)
        self.pieces = np.array(pieces, np.int64).reshape(-1, 3)
        self.tiles = np.array(tiles, np.int64).reshape(-1, 2)


def store_kv(k: NDArray[np.float32], v: NDArray[np.float32], keys: Any, values: Any, batch: Batch) -> None:
    """Round each token's key and value to the cache's dtype and write them into their slots.

    Args:
        k: [T, K, D]; rows may lie apart
        v: likewise
        keys: this layer's pages [pages, K, P, D], changed in place: float32, or `StoredVectors`
        values: likewise
        batch: the slots
    """
    for source, pages in ((k, _stored(keys)), (v, _stored(values))):
        _store_kernel(pages.data.dtype.name)(
            with_whole_rows(source), pages.data, pages.scales, batch.slot_pages, batch.slot_offsets
        )


def with_whole_rows(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The array itself where each x[i] is contiguous, else a copy."""
    expected = x.itemsize
    for extent, stride in zip(x.shape[:0:-1], x.strides[:0:-1], strict=True):
        if stride != expected and extent > 1:
            return np.ascontiguousarray(x)
        expected *= extent
    return x


def _stored(pages: Any) -> StoredVectors:
    return pages if isinstance(pages, StoredVectors) else StoredVectors(pages)


def _pages(dtype: str) -> tuple[Any, Any]:
    """Types of an array of pages and of its scales."""
    element = getattr(types, dtype)
    return types.Array(element, 4, "C"), types.Array(_FLOAT, 3, "C") if dtype == "int8" else types.none


def _signature(dtype: str, *scratch: Any) -> Any:
    pages = types.Tuple(_pages(dtype))
    plan = types.Tuple((_INDICES, _INDICES, types.Array(types.boolean, 1, "C"), _INDICES))
    queries, out = types.Array(_FLOAT, 3, "A"), types.Array(_FLOAT, 3, "C")
    return types.void(queries, pages, pages, plan, _FLOAT, *scratch, out)


@cache
def _rows_kernel(dtype: str) -> Any:
    scratch = types.Array(_FLOAT, 2, "C")
    return kernel(_signature(dtype, scratch, scratch), parallel=True)(attention_rows.attend_rows)


@cache
def _tiles_kernel(dtype: str) -> Any:
    return kernel(_signature(dtype, types.Array(_FLOAT, 2, "C")), parallel=True)(attention_tiles.attend_tiles)


@cache
def _store_kernel(dtype: str) -> Any:
    indices = types.Array(types.int64, 1, "C")
    return kernel(types.void(types.Array(_FLOAT, 3, "A"), *_pages(dtype), indices, indices))(_store)


def _store(source: Any, pages: Any, scales: Any, slot_pages: Any, slot_offsets: Any) -> None:
    K, D = source.shape[1:]
    for t in range(len(slot_pages)):
        row = row_of(source, t)
        for head in range(K):
            store_vector(row[head * D : head * D + D], pages, scales, slot_pages[t], head, slot_offsets[t])
