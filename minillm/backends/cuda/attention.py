"""Launching the attention kernels: which one, how its work is cut, and the workspace it needs.

What is decided here is decided by shapes alone, so a launch can be captured in a CUDA graph.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np

from .kernels import STORAGE, Kernels
from .kv import row_stride

SPLIT = 128
"""Positions that a block of the decode kernel takes at a time; the head of its source gives the reason."""

DECODE_BLOCKS = 2048
"""More blocks than this only wait: twice what a GPU of 132 multiprocessors holds. A smaller batch gets more blocks for
each sequence."""

MAX_GROUP = 8
"""Query heads of one K/V head that a block of the decode kernel computes together; a thread holds a part of each."""

MAX_HEAD_DIM = 256


class Ragged(Protocol):
    """What attention must know of a batch, in int32 arrays on the device."""

    @property
    def query_starts(self) -> Any:
        """[N + 1]: sequence i owns the rows query_starts[i] : query_starts[i + 1]"""

    @property
    def context_lens(self) -> Any:
        """[N]: S of each sequence, its new tokens included; 0 for a padded sequence, whose result is zeros"""

    @property
    def block_table(self) -> Any:
        """[N, B]: each sequence's pages"""


class Workspace(NamedTuple):
    """What the blocks of the decode kernel leave for each other. One serves all layers, one launch after the other."""

    partials: Any
    """float32, at least as many numbers as `partials_size` says; never read before it is written"""
    arrived: Any
    """int32 [at least N H], zeros before the first launch; each launch leaves zeros"""


def has_kernel(storage: str, D: int) -> bool:
    """Whether heads of this width can be computed here: rows of whole 16-byte pieces, up to `MAX_HEAD_DIM` numbers."""
    return 0 < D <= MAX_HEAD_DIM and D % (4 if STORAGE[storage] == 32 else 8) == 0


def partials_size(N: int, H: int, D: int, positions: int) -> int:
    """Numbers of `Workspace.partials` for N sequences with room for `positions` each (B P of the block table)."""
    return N * H * _splits(positions) * (D + 2)


def attend(
    kernels: Kernels,
    q: Any,
    keys: Any,
    values: Any,
    batch: Ragged,
    out: Any,
    workspace: Workspace,
    *,
    scale: float,
    max_queries: int,
) -> None:
    """Causal attention of every sequence of a ragged batch (`ops.attend`).

    The tree mask of `Span.tree` is not for these kernels: a batch with a tree must go to the reference.

    Args:
        kernels: for the storage type of q, keys, values and out
        q: queries [T, H, D], or a view whose rows lie further apart
        keys: one layer's pages [pages, K, P, D]
        values: likewise
        batch: which rows belong to which sequence, and its pages
        out: [T, H, D], filled; rows past query_starts[N] are left alone
        workspace: for batches of one query per sequence
        scale: above 0: 1 / sqrt D, or what the family uses instead
        max_queries: a bound of the queries of one sequence. With 1 every sequence must have one, so that T = N.
    """
    if len(q) == 0:
        return
    if max_queries == 1 and len(q) == len(batch.context_lens):
        decode(kernels, q, keys, values, batch, out, workspace, scale=scale)
    else:
        prefill(kernels, q, keys, values, batch, out, scale=scale)


def decode(
    kernels: Kernels, q: Any, keys: Any, values: Any, batch: Ragged, out: Any, workspace: Workspace, *, scale: float
) -> None:
    """One query for each sequence. Arguments as in `attend`."""
    N, H, D = q.shape
    pages, K, P, _ = keys.shape
    B = batch.block_table.shape[1]
    splits, group = _splits(B * P), _group(H // K)
    assert workspace.partials.size >= partials_size(N, H, D, B * P) and workspace.arrived.size >= N * H // group
    kernel = kernels.get("attention_decode", "attention_decode", HEAD_DIM=D, PAGE_SIZE=P, GROUP=group, SPLIT=SPLIT)
    blocks = max(1, min(splits, DECODE_BLOCKS // (N * H // group)))
    arrays = out, workspace.partials, workspace.arrived, q, keys, values, batch.context_lens, batch.block_table
    sizes = (np.int32(number) for number in (H, K, pages, B, splits))
    kernel((blocks, H // group, N), (128,), (*arrays, *sizes, row_stride(q), row_stride(out), np.float32(scale)))


def prefill(kernels: Kernels, q: Any, keys: Any, values: Any, batch: Ragged, out: Any, *, scale: float) -> None:
    """Any number of queries for each sequence. Arguments as in `attend`."""
    T, H, D = q.shape
    pages, K, P, _ = keys.shape
    N, B = batch.block_table.shape
    tile = PrefillTile.of(kernels.storage, D)
    constants = {"HEAD_DIM": D, "PAGE_SIZE": P, "QUERIES": tile.queries, "KEYS": tile.keys}
    kernel = kernels.get("attention_prefill", "attention_prefill", shared_mem=tile.shared_bytes, **constants)
    arrays = out, q, keys, values, batch.query_starts, batch.context_lens, batch.block_table
    sizes = (np.int32(number) for number in (N, H, K, pages, B))
    grid = T // tile.queries + N, H
    arguments = (*arrays, *sizes, row_stride(q), row_stride(out), np.float32(scale))
    kernel(grid, (tile.threads,), arguments, shared_mem=tile.shared_bytes)


class PrefillTile(NamedTuple):
    """How the prefill kernel cuts its work: chosen so that registers suffice and shared memory stays below 99 KiB."""

    queries: int
    keys: int
    threads: int
    shared_bytes: int
    """Two tiles of keys and of values, and for float32 the queries and the weights."""

    @classmethod
    def of(cls, storage: str, D: int) -> "PrefillTile":
        """The tile for heads of width D."""
        if STORAGE[storage] == 32:
            queries, keys = (64, 32) if D <= 64 else (64, 16) if D <= 128 else (32, 8)
            numbers = (4 * keys + queries) * (D + 4) + queries * (keys + 1)
            return cls(queries, keys, 128, 4 * numbers)
        queries, keys = 64, 64 if D <= 128 else 32 if D <= 192 else 16
        depth = -(-D // 16) * 16
        return cls(queries, keys, 2 * queries, 2 * 4 * keys * (depth + 8))


def _splits(positions: int) -> int:
    return -(-positions // SPLIT)


def _group(G: int) -> int:
    """The largest divisor of G that a block can hold."""
    return max(group for group in range(1, min(G, MAX_GROUP) + 1) if G % group == 0)
