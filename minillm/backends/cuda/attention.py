"""Launches attention and the writing of the K/V cache (`kernels/cuda/attention_*.cu`, `kv.cu`).

`attend` selects a kernel, splits its work, and sizes its workspace. All decisions depend on shapes alone, so a launch
can be captured in a CUDA graph. Attention without a kernel (heads of an unsupported width) is `attend_by_reference`.
"""

from collections.abc import Iterable
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...batch import Batch
from ...reference.attention import AttentionSpec, attention_scores, attention_weights, merge_values, seen_spans
from .kernels import NULL, STORAGE, Kernels, int32s, or_null, row_stride

SPLIT = 128
"""Positions that a block of the decode kernel takes at a time, or twice as many of narrow heads (`split_of`); the head
of its source gives the reason."""

DECODE_BLOCKS = 16
"""The most blocks of a launch for each multiprocessor, four to five times what it holds; more would only wait. A
smaller batch gets more blocks for each sequence."""

DECODE_THREADS = 128

MAX_GROUP = 8
"""Query heads of one K/V head that a block of the decode kernel computes together; a thread holds a part of each."""

MAX_HEAD_DIM = 256
"""The widest heads of the prefill kernel: a thread of its tile keeps a 32nd of 16 queries and of their results"""
MAX_DECODE_HEAD_DIM = 512
"""The widest heads of the decode kernel; beyond `MAX_HEAD_DIM` it computes half as many heads together"""
MAX_LATENT_DIM = 576
"""Numbers of a head at most, and of a key whose last ones are the value"""
MOST_COLUMNS = 128
"""Numbers of a value that a block of the prefill kernel adds up, of keys above `MAX_HEAD_DIM`; half as many above
`MOST_QUERY_REGISTERS` in 16 bits, where a thread's part of the queries leaves no registers for more"""
MOST_QUERY_REGISTERS = 384
WIDE_GROUP = 2
"""As `MAX_GROUP`, of keys above `MAX_HEAD_DIM`"""
WARPGROUP_QUERIES = 128
"""Queries of a block of attention_wgmma, which takes over from so many new tokens of a sequence on"""
WARPGROUP_KEYS = {64: 128, 128: 128, 256: 64}
"""Numbers of a head, where it is one of these -> keys of a tile of it"""
KV_THREADS = 256


class Ragged(Protocol):
    """The arrays of a batch that attention reads, int32 on the device."""

    @property
    def query_starts(self) -> Any:
        """[N + 1]: sequence i owns the rows query_starts[i] : query_starts[i + 1]"""

    @property
    def context_lens(self) -> Any:
        """[N]: S of each sequence, its new tokens included; 0 for a padded sequence, whose result is zeros"""

    @property
    def block_table(self) -> Any:
        """[N, B]: each sequence's pages"""


class Trees(NamedTuple):
    """The trees of guesses that sequences of a batch end in, on the device (`Span.tree`)."""

    seen: Any
    """[T, words] uint32: bit k of a node's row says whether it sees node k of its tree. Rows of no tree are not read"""
    sizes: Any
    """[N] int32, nodes of each sequence's tree; 0 for none"""

    def after(self, sequences: int) -> "Trees":
        """The trees of the sequences after the first ones; rows stay those of the whole batch."""
        return self._replace(sizes=self.sizes[sequences:])


class Workspace(NamedTuple):
    """Partial results of the decode kernel's blocks. One serves all layers, one launch after the other."""

    partials: Any
    """float32, at least as many numbers as `partials_size` says; never read before it is written"""
    arrived: Any
    """int32 [at least N H], zeros before the first launch; each launch leaves zeros"""


def has_kernel(storage: str, D: int, V: int | None = None, *, decodes: bool = False) -> bool:
    """Whether the kernels take heads of this width: rows of whole 16-byte pieces, up to `MAX_HEAD_DIM` numbers.

    The decode kernel, for one query of each sequence, takes them up to `MAX_DECODE_HEAD_DIM`. Or keys of D numbers, up
    to `MAX_LATENT_DIM`, of which the last V are the values.
    """
    piece = 4 if STORAGE[storage] == 32 else 8
    if V is None or V == D:
        return 0 < D <= (MAX_DECODE_HEAD_DIM if decodes else MAX_HEAD_DIM) and D % piece == 0
    return V < D <= MAX_LATENT_DIM and D % piece == 0 and V % piece == 0


def has_variant(spec: AttentionSpec) -> bool:
    """Whether the kernels know a variant: all but relative positions, and two changes of a score that no model has."""
    changes = spec.slopes, spec.bias, spec.softcap
    known = spec.relative is None and sum(change is not None for change in changes) < 2
    return known and not (spec.cross and knows_places(spec))


def knows_places(spec: AttentionSpec) -> bool:
    """Whether a variant asks how far a key is from its query, and not only which of them is first."""
    return spec.window is not None or spec.slopes is not None or spec.bias is not None


def reach(window: int | None, positions: int) -> int:
    """The most positions that a query sees, where a block table has room for `positions`."""
    return positions if window is None else min(window, positions)


def partials_size(N: int, H: int, D: int, positions: int) -> int:
    """Size of `Workspace.partials` for N sequences whose queries see up to `positions` positions (see `reach`).

    D is the width of a value.
    """
    return N * H * -(-positions // SPLIT) * (D + 2)


def attend(
    kernels: Kernels,
    q: Any,
    keys: Any,
    values: Any,
    batch: Ragged,
    out: Any,
    workspace: Workspace,
    spec: AttentionSpec,
    *,
    max_queries: int,
    singles: int = 0,
    positions: Any = None,
    trees: Trees | None = None,
) -> None:
    """Attention of every sequence of a ragged batch (`reference.attend`).

    Sequences that decode in a pass with prompts have a launch of their own: the decode kernel reads keys and values
    once for all heads that share them and divides a long context among blocks, which the prefill kernel does not.

    Args:
        kernels: for the storage type of q, keys, values and out
        q: queries [T, H, D], or a view with a larger row stride
        keys: one layer's pages [pages, K, P, D]
        values: likewise, or a view of the last numbers of the keys [pages, K, P, V]
        batch: which rows belong to which sequence, and its pages; or those of its source
        out: [T, H, V], filled; rows past query_starts[N] are not changed
        workspace: for the sequences of one query
        spec: the variant, one that `has_variant`, its arrays float32
        max_queries: an upper bound of the queries of one sequence. With 1 every sequence must have one, so that T = N.
        singles: number of the first sequences, each of which has one query, of a batch with others after them
        positions: [T] int32, of each token, in a tree by its depth; for trees, and a spec that is not causal
        trees: which tokens of a tree see each other, in a batch where a sequence of several queries ends in one
    """
    if len(q) == 0:
        return
    mask = Mask.of(spec, positions=batch.block_table.shape[1] * keys.shape[2])
    if is_decode(q, batch, max_queries, spec):
        decode(kernels, q, keys, values, batch, out, workspace, mask)
        return
    if singles:
        first = Sequences(batch.query_starts, batch.context_lens[:singles], batch.block_table[:singles])
        decode(kernels, q[:singles], keys, values, first, out[:singles], workspace, mask)
        batch = Sequences(batch.query_starts[singles:], batch.context_lens[singles:], batch.block_table[singles:])
        trees = None if trees is None else trees.after(singles)
    many = max_queries >= WARPGROUP_QUERIES and trees is None
    if many and has_warpgroups(kernels, q.shape[2], values.shape[3], spec):
        warpgroup_prefill(kernels, q, keys, values, batch, out, mask)
        return
    prefill(kernels, q, keys, values, batch, out, mask, positions, trees)


class Sequences(NamedTuple):
    """Some sequences of a batch, as `Ragged`; their rows are those of the whole batch."""

    query_starts: Any
    context_lens: Any
    block_table: Any


def count_singles(counts: Iterable[int]) -> int:
    """The number of sequences before the first with several new tokens, of the numbers of their new tokens."""
    return sum(1 for _ in takewhile(lambda count: count == 1, counts))


def is_decode(q: Any, batch: Ragged, max_queries: int, spec: AttentionSpec) -> bool:
    """Whether every sequence has one query, which sees all of a context, or is the last of it."""
    return max_queries == 1 and len(q) == len(batch.context_lens) and is_last_or_sees_all(spec)


def is_last_or_sees_all(spec: AttentionSpec) -> bool:
    """Whether the decode kernel serves a sequence's only query: its place is the context's last one, or is nothing."""
    return spec.causal or not knows_places(spec)


class Mask(NamedTuple):
    """An `AttentionSpec` as the kernels take it (`kernels/cuda/mask.cuh`)."""

    scale: np.float32
    window: int
    slopes: Any
    sinks: Any
    bias: Any
    most: int
    """The largest distance that has a bias of its own"""
    cap: np.float32
    causal: bool
    constants: dict[str, int]
    """Macros for the compiler: without one, the build has no code for its feature"""

    @classmethod
    def of(cls, spec: AttentionSpec, positions: int) -> "Mask":
        """`positions`: an upper bound of all contexts. A window at least that long counts as none."""
        seen, slopes, bias, cap = reach(spec.window, positions), spec.slopes, spec.bias, spec.softcap
        switches = {"WINDOWED": seen < positions, "BIASED": slopes is not None, "CAPPED": cap is not None}
        switches |= {"SUNK": spec.sinks is not None, "BY_DISTANCE": bias is not None}
        assert has_variant(spec), spec
        constants = {name: 1 for name, on in switches.items() if on}
        return cls(
            np.float32(spec.scale),
            seen,
            or_null(slopes),
            or_null(spec.sinks),
            or_null(bias),
            0 if bias is None else bias.shape[1] // 2,
            np.float32(cap or 0),
            spec.causal,
            constants,
        )


def decode(
    kernels: Kernels,
    q: Any,
    keys: Any,
    values: Any,
    batch: Ragged,
    out: Any,
    workspace: Workspace,
    mask: Mask,
) -> None:
    """One query for each sequence. Arguments as in `attend`."""
    (N, H, D), V = q.shape, values.shape[3]
    pages, K, P, _ = keys.shape
    B = batch.block_table.shape[1]
    most = MAX_GROUP if D <= MAX_HEAD_DIM else WIDE_GROUP if V < D else MAX_GROUP // 2
    split = split_of(D, q.dtype.itemsize)
    splits = -(-mask.window // split)
    group = group_of(H // K, most, N * K * splits, kernels.processors)
    assert workspace.partials.size >= N * H * splits * (V + 2) and workspace.arrived.size >= N * H // group
    constants = {"HEAD_DIM": D, "PAGE_SIZE": P, "GROUP": group, "SPLIT": split, **mask.constants}
    constants |= {} if V == D else {"VALUE_DIM": V}
    shared = staged_bytes(D, q.dtype.itemsize)
    kernel = kernels.get("attention_decode", "attention_decode", shared_mem=shared, **constants)
    blocks = max(1, min(splits, DECODE_BLOCKS * kernels.processors // (N * H // group)))
    arrays = out, workspace.partials, workspace.arrived, q, keys, values, batch.context_lens, batch.block_table
    sizes = int32s(H, K, pages, B, splits, row_stride(q), row_stride(out), mask.window, mask.most)
    arguments = (*arrays, mask.slopes, mask.sinks, mask.bias, *sizes, mask.scale, mask.cap)
    kernel((blocks, H // group, N), (DECODE_THREADS,), arguments, shared_mem=shared)


def prefill(
    kernels: Kernels,
    q: Any,
    keys: Any,
    values: Any,
    batch: Ragged,
    out: Any,
    mask: Mask,
    positions: Any = None,
    trees: Trees | None = None,
) -> None:
    """Any number of queries for each sequence. Arguments as in `attend`."""
    (T, H, D), V = q.shape, values.shape[3]
    pages, K, P, _ = keys.shape
    N, B = batch.block_table.shape
    tile = PrefillTile.of(kernels.storage, D, V)
    constants = {"HEAD_DIM": D, "PAGE_SIZE": P, "QUERIES": tile.queries, "KEYS": tile.keys, **mask.constants}
    constants |= {} if V == D else {"VALUE_DIM": V, "COLUMNS": tile.columns}
    constants |= {} if trees is None else {"TREED": 1}
    constants |= {} if mask.causal else {"BIDIRECTIONAL": 1}
    kernel = kernels.get("attention_prefill", "attention_prefill", shared_mem=tile.shared_bytes, **constants)
    arrays = out, q, keys, values, batch.query_starts, batch.context_lens, batch.block_table
    tree = (NULL, NULL) if trees is None else trees
    terms = mask.slopes, mask.sinks, mask.bias, or_null(positions), *tree
    words = 0 if trees is None else trees.seen.shape[1]
    sizes = int32s(N, H, K, pages, B, row_stride(q), row_stride(out), mask.window, mask.most, words)
    grid = T // tile.queries + N, H, V // tile.columns
    arguments = (*arrays, *terms, *sizes, mask.scale, mask.cap)
    kernel(grid, (tile.threads,), arguments, shared_mem=tile.shared_bytes)


def has_warpgroups(kernels: Kernels, D: int, V: int, spec: AttentionSpec) -> bool:
    """Whether attention_wgmma takes heads of keys of D numbers and values of V: causal, without a bias by distance."""
    taken = kernels.storage != "float32" and D == V and D in WARPGROUP_KEYS and kernels.has("attention_wgmma")
    return taken and spec.causal and spec.bias is None


def warpgroup_prefill(kernels: Kernels, q: Any, keys: Any, values: Any, batch: Ragged, out: Any, mask: Mask) -> None:
    """`prefill` by products of warpgroups, where `has_warpgroups`."""
    T, H, D = q.shape
    pages, K, P, _ = keys.shape
    N, B = batch.block_table.shape
    shared = warpgroup_bytes(D)
    constants = {"HEAD_DIM": D, "PAGE_SIZE": P, "KEYS": WARPGROUP_KEYS[D], **mask.constants}
    kernel = kernels.get("attention_wgmma", "attention_wgmma", shared_mem=shared, **constants)
    arrays = out, q, keys, values, batch.query_starts, batch.context_lens, batch.block_table, mask.slopes, mask.sinks
    sizes = int32s(N, H, K, pages, B, row_stride(q), row_stride(out), mask.window)
    grid = T // WARPGROUP_QUERIES + N, H
    kernel(grid, (256,), (*arrays, *sizes, mask.scale, mask.cap), shared_mem=shared)


def warpgroup_bytes(D: int) -> int:
    """Shared memory of attention_wgmma: the queries, two tiles of keys and two of values."""
    return 2 * D * (WARPGROUP_QUERIES + 4 * WARPGROUP_KEYS[D])


class PrefillTile(NamedTuple):
    """Tile sizes of the prefill kernel, chosen so that registers suffice and shared memory stays below 99 KiB."""

    queries: int
    keys: int
    threads: int
    shared_bytes: int
    """Two tiles of keys and of values, and for float32 the queries and the weights."""
    columns: int
    """Numbers of each value that a block adds up: of latents, at most `MOST_COLUMNS`"""

    @classmethod
    @cache
    def of(cls, storage: str, D: int, V: int | None = None) -> "PrefillTile":
        """The tile for heads of width D, or for keys of D numbers with values of V."""
        V, piece = V or D, 4 if STORAGE[storage] == 32 else 8
        columns = V
        if D > MAX_HEAD_DIM:
            most = MOST_COLUMNS // 2 if piece == 8 and D > MOST_QUERY_REGISTERS else MOST_COLUMNS
            columns = max(width for width in range(piece, most + 1, piece) if V % width == 0)
        if STORAGE[storage] == 32:
            queries, keys = (64, 32) if D <= 64 else (64, 16) if D <= 128 else (32, 8) if D <= MAX_HEAD_DIM else (16, 8)
            numbers = (2 * keys + queries) * (D + 4) + 2 * keys * (columns + 4) + queries * (keys + 1)
            return cls(queries, keys, 128, 4 * numbers, columns)
        queries, keys = 64, 64 if D <= 128 else 32 if D <= 192 else 16
        depths = sum(-(-width // 16) * 16 + 8 for width in (D, columns))
        return cls(queries, keys, 2 * queries, 2 * 2 * keys * depths, columns)


def attend_by_reference(
    q: Any,
    keys: Any,
    values: Any,
    batch: Batch,
    spec: AttentionSpec,
    xp: Any,
    out: Any,
) -> Any:
    """`reference.attend` in float32, each sequence's pages first gathered into one.

    Pages are small here, and a loop over them would take a launch for each. Arguments as of `reference.attend`.
    """
    for span in seen_spans(batch, spec, keys.shape[2]):
        n = span.stop - span.start
        alone = span._replace(start=0, stop=n, pages=(0,))
        queries = q[span.start : span.stop].astype(xp.float32)
        paged = _gathered(keys, span.pages, xp)
        scores = attention_scores(queries, paged, alone, n, spec, xp)  # -> [K, G n, S]
        attention_weights(scores, spec, xp, out=scores)
        z = xp.empty((n, q.shape[1], values.shape[3]), xp.float32)
        merge_values(scores, _gathered(values, span.pages, xp), alone, z, xp)
        out[span.start : span.stop] = z.astype(out.dtype)
    return out


def _gathered(pages: Any, wanted: tuple[int, ...], xp: Any) -> Any:
    """Gather pages into one long page of float32. [pages, K, P, D] -> [1, K, B P, D]"""
    _, K, _, D = pages.shape
    picked = pages[xp.asarray(wanted)].astype(xp.float32)  # -> [B, K, P, D]
    return picked.transpose(1, 0, 2, 3).reshape(1, K, -1, D)  # -> [K, B, P, D] -> [1, K, B P, D]


class StoreArguments(NamedTuple):
    """The arguments of the kernel `store_kv`."""

    keys: Any
    values: Any
    k: Any
    v: Any
    slots: Any
    K: np.int32
    pages: np.int32
    k_stride: np.int32
    v_stride: np.int32


def store_kv(kernels: Kernels, k: Any, v: Any, keys: Any, values: Any, slots: Any) -> None:
    """Write each token's key and value into its slot.

    Args:
        kernels: for the storage type of the arrays
        k: [T, K, D], or a view with a larger row stride, as from a fused projection; [T, K, D - V] of latents
        v: likewise; [T, K, V] of latents
        keys: one layer's pages [pages, K, P, D], changed in place
        values: likewise, or a view of the last numbers of the keys [pages, K, P, V]
        slots: [T] int32: page * P + offset; -1 where nothing is to be stored
    """
    T, K, width = k.shape
    pages, _, P, D = keys.shape
    if T == 0:
        return
    parts = {} if width == D else {"KEY_DIM": width, "VALUE_DIM": v.shape[2]}
    kernel = kernels.get("kv", "store_kv", HEAD_DIM=D, PAGE_SIZE=P, **parts)
    sizes = int32s(K, pages, row_stride(k), row_stride(v))
    kernel((T, 2), (KV_THREADS,), StoreArguments(keys, values, k, v, slots, *sizes))


def copy_positions(kernels: Kernels, keys: Any, values: Any, source: int, target: int, first: int, stop: int) -> None:
    """Copy the positions first : stop of a page to the same place in another page, in all layers.

    Args:
        kernels: for the storage type of the arrays
        keys: all layers' pages [L, pages, K, P, D], changed in place
        values: likewise, or None where they are in the keys
        source: the page to copy from
        target: the page to copy to, another one
        first: offset of the first position in both pages
        stop: offset after the last
    """
    L, pages, K, P, D = keys.shape
    if first == stop or not L:  # all layers have a window, and pages of their own
        return
    kernel = kernels.get("kv", "copy_positions", HEAD_DIM=D, PAGE_SIZE=P)
    sizes = int32s(K, pages, source, target, first, stop)
    kernel((L * K, 1 if values is None else 2), (KV_THREADS,), (keys, or_null(values), *sizes))


def split_of(D: int, itemsize: int) -> int:
    """Positions in a split: twice `SPLIT` where a block can copy the rows of so many at once."""
    return 2 * SPLIT if D * itemsize <= 128 else SPLIT


def staged_bytes(D: int, itemsize: int) -> int:
    """Shared memory in which the decode kernel keeps keys and values (`Staged`): all of a split, 64 KiB at most."""
    pieces = D * itemsize // 16
    lanes = min(1 << (pieces - 1).bit_length(), 32)
    turns = -(-pieces // lanes)
    batch = min(split_of(D, itemsize) * lanes // DECODE_THREADS, 1 << (16 // turns).bit_length() - 1)
    return 2 * 16 * batch * turns * DECODE_THREADS


def group_of(G: int, most: int, blocks: int, processors: int) -> int:
    """Heads of one K/V head that a block computes together: all that it can hold, unless processors would be idle.

    Keys and values are read once for a block, but those of a few short contexts come from the L2 cache anyway, and
    eight heads in one block are eight times its arithmetic while other processors have none. A head's sums have the
    same order in each group, and so the same bits. What it gains is not yet measured.

    Args:
        G: query heads of a K/V head
        most: heads that a block holds
        blocks: there would be if each block took all heads of a K/V head
        processors: of the device

    Returns:
        The largest divisor of G with as many blocks as processors, or 1.
    """
    divisors = [group for group in range(1, min(G, most) + 1) if G % group == 0]
    return max((group for group in divisors if blocks * G // group >= processors), default=1)
