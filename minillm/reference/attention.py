"""Scaled dot-product attention over a paged K/V cache, and the writing of that cache.

For each head: Z = softmax(Q K^T / sqrt D) V, where a query sees the keys at its own position and before (Vaswani et
al., arXiv 1706.03762, section 3.2.1); or, if it is not causal, all keys of its sequence's context, as in an encoder or
from a decoder to its encoder. The new tokens' keys and values are in the cache already. Pages are read as views and
never gathered into one array, which would cost several times the attention itself.

Four variants, in the order in which they change a score: a soft cap c bounds it, c tanh(score / c) (Gemma Team,
arXiv 2408.00118, section 2). A learned bias by the distance from query to key is added (T5: Raffel et al., arXiv
1910.10683, section 2.1). With a sliding window W a query at position p sees the positions p - W + 1 to p (Jiang et al.,
"Mistral 7B", arXiv 2310.06825, section 2), and up to p + W - 1 if it is not causal. With ALiBi each head subtracts its
slope m times the distance between query and key (Press et al., arXiv 2108.12409, section 3). DeBERTa's adds products
with relative positions: `disentangled.py`.

A head may have a sink, a learned logit that takes part in each softmax and has no value (OpenAI, "gpt-oss-120b and
gpt-oss-20b model card", arXiv 2508.10925, section 2): the weights of its keys then sum to less than one.

Values may be narrower than keys, V for D. In latent attention (DeepSeek-AI, arXiv 2405.04434, section 2.1) they are the
last V numbers of each key, one head for all queries, and the cache has no more than the keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..batch import Batch, Span
from .cost import Cost
from .disentangled import RelativePositions, add_positions, positions_flops

QUERY_TILE = 128
"""Queries computed together in a prefill. A tile reads only the keys visible to its last query, which saves almost half
of the scores of a long prompt, and its scores stay in the processor's cache."""


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """A layer's variant of attention: how its scores are computed, and which keys a query sees."""

    scale: float
    """Factor of scores, above 0: 1 / sqrt D, or the family's own"""
    causal: bool = True
    """False: a query sees the keys after it too, as in an encoder"""
    window: int | None = None
    """W, positions that a query sees, its own included, and as many after it if not causal; None: no window"""
    slopes: Any | None = None
    """[H], ALiBi's m; None: no ALiBi. An array here; in a layer a weight, as is `bias`"""
    bias: Any | None = None
    """[H, 2 M + 1], added to scores by distance: for a key d after its query column M + d, d at most M; or None"""
    softcap: float | None = None
    """c; None: no cap"""
    sinks: Any | None = None
    """[H], each head's sink, as `slopes`; None: none"""
    relative: RelativePositions | None = None
    """Relative positions that scores depend on by content (DeBERTa); None: none"""
    cross: bool = False
    """Attention over the source of each sequence, which is not causal; `attend` gets the batch of the sources then"""

    has_weights: bool = field(init=False)
    """Whether any of its terms are arrays, or in a layer weights"""

    def __post_init__(self) -> None:
        assert not (self.cross and self.causal), "a source has no order in common with the queries"
        terms = (self.slopes, self.bias, self.sinks, self.relative)
        object.__setattr__(self, "has_weights", any(term is not None for term in terms))

    def with_arrays(self, array_of: Callable[[Any], Any]) -> "AttentionSpec":
        """The same variant, with an array in place of each weight."""
        weights = {"slopes": self.slopes, "bias": self.bias, "sinks": self.sinks}
        arrays = {name: array_of(weight) for name, weight in weights.items() if weight is not None}
        relative = None if self.relative is None else self.relative.with_arrays(array_of)
        return replace(self, **arrays, relative=relative)


def attend(q: Any, keys: Any, values: Any, batch: Batch, spec: AttentionSpec, xp: Any, out: Any) -> Any:
    """Attention of every sequence of a ragged batch.

    Args:
        q: queries [T, H, D]
        keys: this layer's pages [pages, K, P, D]
        values: likewise, [pages, K, P, V]
        batch: which rows belong to which sequence, and its pages
        spec: the variant
        xp: the array module
        out: [T, H, V], filled and returned
    """
    for span in batch.spans if spec.window is None else seen_spans(batch, spec, keys.shape[2]):
        tile = QUERY_TILE if spec.relative is None else span.stop - span.start  # keys meet the positions once
        for first in range(span.start, span.stop, tile):
            last = min(first + tile, span.stop)
            scores = attention_scores(q[first:last], keys, span, last, spec, xp)  # [K, G n, S]
            weights = attention_weights(scores, spec, xp, out=scores)
            merge_values(weights, values, span, out[first:last], xp)
    return out


def seen_spans(batch: Batch, spec: AttentionSpec, page_size: int) -> Sequence[Span]:
    """The sequences, without the pages before the window of their first query, which may be others' by now."""
    window = spec.window
    if window is None or not spec.causal:  # a query that sees what follows is in a pass of its whole text
        return batch.spans
    spans = []
    for span in batch.spans:
        S, first = (
            span.context_len,
            span.context_len - (span.stop - span.start),
        )  # the first query's place, also a tree's
        pages = max(0, first + 1 - window) // page_size
        gone = pages * page_size
        spans.append(span._replace(pages=span.pages[pages:], context_len=S - gone, text_len=span.text_len - gone))
    return spans


def attention_scores(q: Any, keys: Any, span: Span, last: int, spec: AttentionSpec, xp: Any) -> Any:
    """Q K^T * scale of one tile of queries, -inf where a key is after its query or outside its window.

    Args:
        q: [n, H, D], the rows last - n : last of the batch
        keys: [pages, K, P, D]
        span: the sequence
        last: the batch row after the tile's last query; it sees S = context_len - (span.stop - last) keys, or all of
            the context if it is not causal
        spec: the variant
        xp: the array module

    Returns:
        [K, G n, S]: G = H / K query heads share each K/V head; the queries of one head are contiguous.
    """
    n, H, D = q.shape
    _, K, P, _ = keys.shape
    causal, window = spec.causal, spec.window
    after = span.stop - last  # queries of the sequence after this tile
    S = span.context_len - (after if causal else 0)
    grouped = xp.multiply(q, spec.scale).reshape(n, K, H // K, D).transpose(1, 2, 0, 3)  # [n, H, D] -> [K, G, n, D]
    grouped = grouped.reshape(K, H // K * n, D)  # [K, G, n, D] -> [K, G n, D]
    scores = xp.empty((K, H // K * n, S), q.dtype)
    for start, page in zip(range(0, S, P), span.pages, strict=False):
        size = min(P, S - start)
        page_keys = keys[page, :, :size].swapaxes(1, 2)  # [K, size, D] -> [K, D, size]
        xp.matmul(grouped, page_keys, out=scores[:, :, start : start + size])
    by_head = scores.reshape(K, H // K, n, S)  # a view
    if spec.softcap is not None:
        scores /= spec.softcap
        xp.tanh(scores, out=scores)
        scores *= spec.softcap
    if causal and n > 1:
        newest = by_head[..., S - n :]  # the keys of the tile itself
        newest += xp.triu(xp.full((n, n), -xp.inf, q.dtype), 1)
    if causal and span.tree is not None:
        _hide_other_branches(by_head, span, last, xp)
    by_place = spec.slopes is not None or spec.bias is not None or spec.relative is not None
    if by_place or (window is not None and window < S):
        stop = len(span.positions()) - after
        back = span.positions()[stop - n : stop, None] - span.key_positions()[:S]  # [n, S]
        if spec.bias is not None:
            M = spec.bias.shape[1] // 2
            by_head += spec.bias[:, xp.asarray(M - np.clip(back, -M, M))].reshape(K, H // K, n, S)
        if spec.relative is not None:
            add_positions(scores, grouped, keys, span.pages, back, spec.relative, xp)
        back = xp.asarray(back if causal else np.abs(back))  # distances
        if window is not None:
            by_head += xp.where(back < window, 0, -xp.inf).astype(scores.dtype)
        if spec.slopes is not None:
            by_head -= spec.slopes.reshape(K, H // K, 1, 1) * back.astype(scores.dtype)
    return scores


def attention_weights(scores: Any, spec: AttentionSpec, xp: Any, out: Any | None = None) -> Any:
    """Softmax of each query's scores, and of its head's sink. [K, G n, S] -> [K, G n, S]; `out` may be `scores`.

    The largest is subtracted first, which changes nothing in exact arithmetic and keeps exp from overflowing.
    """
    best = scores.max(axis=-1, keepdims=True)  # [K, G n, S] -> [K, G n, 1]
    if spec.sinks is not None:
        K, rows, _ = best.shape
        sinks = xp.repeat(spec.sinks, K * rows // len(spec.sinks)).reshape(best.shape)  # [H] -> [K, G n, 1]
        best = xp.maximum(best, sinks)
    weights = xp.exp(xp.subtract(scores, best, out=out), out=out)
    total = weights.sum(axis=-1, keepdims=True)  # -> [K, G n, 1]
    weights /= total if spec.sinks is None else total + xp.exp(sinks - best)
    return weights


def _hide_other_branches(scores: Any, span: Span, last: int, xp: Any) -> None:
    """Set scores of tree tokens that are not ancestors of the query to -inf.

    The causal mask has hidden later tokens already. The tree is the end of its sequence, in the queries as in the keys;
    a tile may hold a part of it.

    Args:
        scores: [K, G, n, S], changed in place
        span: the sequence, with its tree [m, m]
        last: the batch row after the tile's last query
        xp: the array module
    """
    n, S = scores.shape[-2:]
    m = len(span.tree)  # type: ignore[arg-type]
    stop = m - (span.stop - last)  # the tile ends before this row of the tree
    first = max(0, stop - n)
    if first < stop:
        seen = xp.asarray(span.tree[first:stop, :stop])  # type: ignore[index]
        scores[:, :, n - (stop - first) :, S - stop :] += xp.where(seen, 0, -xp.inf).astype(scores.dtype)


def merge_values(weights: Any, values: Any, span: Span, out: Any, xp: Any) -> None:
    """Z = weights V of one tile, with the heads of each query merged.

    Args:
        weights: [K, G n, S]
        values: [pages, K, P, V]
        span: the sequence
        out: [n, H, V], filled
        xp: the array module
    """
    n, H, V = out.shape
    _, K, P, _ = values.shape
    S = weights.shape[-1]
    z = xp.matmul(weights[:, :, :P], values[span.pages[0], :, : min(P, S)])  # [K, G n, size] -> [K, G n, V]
    for start, page in zip(range(P, S, P), span.pages[1:], strict=False):
        size = min(P, S - start)
        z += xp.matmul(weights[:, :, start : start + size], values[page, :, :size])
    out.reshape(n, K, H // K, V)[...] = z.reshape(K, H // K, n, V).transpose(2, 0, 1, 3)


def attention_cost(
    batch: Batch,
    H: int,
    D: int,
    position_bytes: int,
    spec: AttentionSpec,
    number_bytes: int = 4,
    value_dim: int = 0,
) -> Cost:
    """FLOPs per visible pair and head: 2 D for the score, 4 for softmax, 2 V for the value; and one scaling of Q.

    Softmax's four: subtraction of the maximum, exponential, sum, division. A soft cap takes three more (division,
    hyperbolic tangent, product), a bias one, ALiBi two (a product and a subtraction). A sink takes three for each query
    and head: subtraction, exponential, sum. Either term of relative positions takes one, beside its products
    (`positions_flops`). Each sequence's visible keys and values are read once, as are slopes, sinks, the bias of so
    many distances (float32), relative positions and the queries; the result is written once.

    `position_bytes` is the size of one position's keys and values in one layer of the cache; `value_dim` V, 0 for D.
    """
    V = value_dim or D
    terms = (spec.softcap, spec.bias, spec.slopes, spec.sinks)
    capped, biased, sloped, sunk = (term is not None for term in terms)
    distances = spec.bias.shape[1] if spec.bias is not None else 0
    scores = H * batch.visible_pairs(spec.window, causal=spec.causal)
    positions = () if spec.relative is None else spec.relative.terms
    changes = 3 * capped + biased + 2 * sloped + len(positions)
    flops = scores * (2 * (D + V) + 4 + changes) + batch.num_tokens * H * (D + 3 * sunk)
    if spec.relative is not None:
        flops += positions_flops(spec.relative, batch.num_tokens, batch.reach())
    query_bytes, result_bytes = (number_bytes * batch.num_tokens * H * width for width in (D, V))
    saved = number_bytes * scores * (4 + changes)  # scores written, changed and normalised in place, read
    read = query_bytes + batch.reach(spec.window) * position_bytes + 4 * H * (sloped + sunk + distances)
    read += sum(term.nbytes for term in positions)
    return Cost(flops, read, result_bytes, saved)


def store_kv(k: Any, v: Any, keys: Any, values: Any, batch: Batch) -> None:
    """Write each token's key and value to its slot, a page and an offset.

    Args:
        k: [T, K, D]
        v: [T, K, D]
        keys: this layer's pages [pages, K, P, D], changed in place
        values: likewise
        batch: has the slots
    """
    keys[batch.slot_pages, :, batch.slot_offsets] = k
    values[batch.slot_pages, :, batch.slot_offsets] = v


def store_joined(k: Any, v: Any, keys: Any, batch: Batch, xp: Any) -> None:
    """As `store_kv`, where values are the last numbers of keys: k [T, K, D - V] and v [T, K, V] become one vector."""
    keys[batch.slot_pages, :, batch.slot_offsets] = xp.concatenate([k, v], axis=2)  # -> [T, K, D]


def kv_cost(T: int, K: int, D: int, position_bytes: int, number_bytes: int = 4, value_dim: int = 0) -> Cost:
    """No arithmetic; T K (D + V) numbers read, and T positions of the cache written; `value_dim` V, 0 for D."""
    return Cost(0, number_bytes * T * K * (D + (value_dim or D)), T * position_bytes)
