"""Attention of few queries at once (decode): each key and value is read from memory once, and nothing is copied.

A piece of work is CHUNK positions of one K/V head of one sequence, so a long context is split over threads even if
there are few heads; the pieces' softmaxes are merged by their maxima and sums (Dao et al., "Flash-Decoding", 2023).
Pieces begin at fixed positions, so the result is bit-identical for any number of threads and any batch.
"""

from typing import Any

import numpy as np

from .arguments import flat, matrix, number, row_at, share_of, stored_vectors, vector
from .elementary import exp, inner, multiply_scales
from .row_products import VECTOR, add_weighted, highest_of, scores_of

CHUNK = 256
"""Positions in one piece of work: a page of the usual size, so that a worker reads memory sequentially."""

_QUERIES = 22
"""Argument number of the queries. In order: keys, values, their scales, queries [T, H D], scale, window, slopes [H] or
nothing, the plan, scratch [workers, scratch_size], out [T, H D]. The plan is an array at a fixed address whose contents
change with the batch, encoded like arguments: block tables [N, pages of the longest]; spans [N, 5]: first row, rows n,
context S, tree size m, where its mask begins; all trees' masks, flat; positions [T]; pieces [pieces, 4]: sequence,
chunk, first of its n H slots, number of chunks of the sequence (0 but at its first); and [slots, D + 2] numbers for the
results of pieces."""
_NOTHING = np.float32(-np.inf)
_ZERO = np.float32(0)


def scratch_size(rows: int, D: int) -> int:
    """float32 numbers that one worker needs for `rows` query rows."""
    return CHUNK + VECTOR + rows * D


@inner
def _softmax(scores: Any, count: int, best: Any, mass: Any, result: Any) -> Any:
    """Turn scores into weights, and rescale the result so far. -> the maximum and the sum so far"""
    highest = max(best, highest_of(scores, count))
    base = highest if highest != _NOTHING else _ZERO  # nothing seen yet: all weights 0, and not NaN
    if highest > best:
        shrink = exp(best - base)
        mass *= shrink
        for d in range(len(result)):
            result[d] *= shrink
    total = _ZERO
    for j in range(count):
        weight = exp(scores[j] - base)
        scores[j] = weight
        total += weight
    return highest, mass + total


@inner
def _before_window(window: Any, position: int, first: int) -> Any:
    """Number of keys from `first` on that are before the window of a query at `position`."""
    return max(0, position - window + 1 - first)


@inner
def _lower(scores: Any, slopes: Any, head: int, position: int, first: int, count: int, line: int, tree: Any) -> None:
    """ALiBi, if there are slopes: lower each score by its head's slope times the distance to the key.

    `line` is the number of keys before the tree, one at each position; `tree` has the positions of the others.
    """
    if len(slopes):
        slope = slopes[head]
        plain = min(count, line - first)
        for j in range(plain):
            scores[j] -= slope * np.float32(position - first - j)
        for j in range(max(0, plain), count):
            scores[j] -= slope * np.float32(position - tree[first + j - line])


@inner
def _hide(scores: Any, first: int, count: int, S: int, m: int, branch: int, seen: Any) -> None:
    """Set scores to -inf where token number `branch` of a tree of m tokens does not see a key of the tree."""
    for j in range(max(0, S - m - first), count):
        if not seen[branch * m + first + j - (S - m)]:
            scores[j] = _NOTHING


@inner
def _attend_chunk(
    arguments: Any, keys: Any, values: Any, rule: Any, table: Any, span: Any, seen: Any, positions: Any, chunk: int,
    head: int, scratch: Any, results: Any, bests: Any, masses: Any,
) -> None:  # fmt: skip
    """Attend from all query rows of one K/V head to one chunk; the rule is (scale, window, slopes, G).

    Writes row by row, a query's heads together: results [n G D], not yet divided by their sums, and maxima and sums [n
    G].
    """
    K, P, D = keys[0].shape[1:]
    start, n, S, m, mask = span
    scale, window, slopes, G = rule
    queries, scores = scratch[: n * G * D], scratch[n * G * D :]
    results[:] = _ZERO
    bests[:] = _NOTHING
    masses[:] = _ZERO
    for i in range(n):
        source = row_at(arguments, _QUERIES, start + i)[head * G * D :]
        for d in range(G * D):
            queries[i * G * D + d] = source[d] * scale
    first, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, S)
    while first < stop:
        page, offset = table[first // P], first % P
        size = min(P - offset, stop - first)
        next_at = ((table[min(first + size, stop - 1) // P] * K + head) * P) * D
        for r in range(n * G):
            query = r // G
            position = positions[start + query]
            begin = first + _before_window(window, position, first)
            count = min(first + size, S - n + query + 1) - begin
            if count > 0:
                result = results[r * D : r * D + D]
                place = offset + begin - first
                at = ((page * K + head) * P + place) * D
                scores_of(queries[r * D : r * D + D], keys[0], at, count, scores, values[0], at)
                multiply_scales(scores, keys[1], page, head, place, count)
                _lower(scores, slopes, head * G + r % G, position, begin, count, S - m, positions[start + n - m :])
                if query >= n - m:
                    _hide(scores, begin, count, S, m, query - (n - m), seen[mask:])
                bests[r], masses[r] = _softmax(scores, count, bests[r], masses[r], result)
                multiply_scales(scores, values[1], page, head, place, count)
                add_weighted(scores, values[0], at, count, result, keys[0], next_at)
        first += size


@inner
def _merge(results: Any, bests: Any, masses: Any, slot: int, step: int, chunks: int, target: Any) -> None:
    """Merge one query row from its chunks, in the slots slot, slot + step, ..."""
    D = len(target)
    highest = _NOTHING
    for c in range(chunks):
        highest = max(highest, bests[slot + c * step])
    mass = _ZERO
    target[:] = _ZERO
    for c in range(chunks):
        at = slot + c * step
        weight = exp(bests[at] - highest)
        mass += weight * masses[at]
        for d in range(D):
            target[d] += weight * results[at * D + d]
    for d in range(D):
        target[d] /= mass


def attend_pieces(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """Kernel of the first part: computes some pieces, each with all query rows of one K/V head."""
    keys, values = stored_vectors(arguments, 0, 12, data), stored_vectors(arguments, 6, 17, data)
    K, D = keys[0].shape[1], keys[0].shape[3]
    tables, spans, seen, positions, pieces, results, bests, masses = _plan(arguments, D)
    G = arguments[_QUERIES + 2] // D // K
    slopes, scratch = vector(arguments, 28, np.float32), matrix(arguments, 32, np.float32)
    rule = np.float32(number(arguments[26])), arguments[27], slopes, G
    first, stop = share_of(len(pieces) * K, share, shares)
    for item in range(first, stop):
        sequence, chunk, slot, _ = pieces[item // K]
        rows = spans[sequence, 1] * G
        slot += item % K * rows
        _attend_chunk(
            arguments, keys, values, rule, tables[sequence], spans[sequence], seen, positions, chunk, item % K,
            scratch[worker], results[slot * D : (slot + rows) * D], bests[slot : slot + rows],
            masses[slot : slot + rows],
        )  # fmt: skip


def merge_pieces(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """Kernel of the second part: merges the results of pieces, sequence by sequence."""
    K, D = arguments[2], arguments[4]
    _, spans, _, _, pieces, results, bests, masses = _plan(arguments, D)
    H = arguments[_QUERIES + 2] // D
    G = H // K
    first, stop = share_of(len(pieces), share, shares)
    for piece in range(first, stop):
        sequence, _, slot, chunks = pieces[piece]
        if chunks:
            start, n = spans[sequence, 0], spans[sequence, 1]
            for i in range(n * H):
                query, head = i // H, i % H
                row = slot + head // G * n * G + query * G + head % G
                target = row_at(arguments, 36, start + query)[head * D : head * D + D]
                _merge(results, bests, masses, row, n * H, chunks, target)


@inner
def _plan(arguments: Any, D: int) -> Any:
    """Decode the plan: the split of a batch, and the arrays for the results of pieces."""
    plan = vector(arguments, 30, np.int64)
    tables, spans, pieces = matrix(plan, 0, np.int64), matrix(plan, 4, np.int64), matrix(plan, 12, np.int64)
    seen, positions = vector(plan, 8, np.bool_), vector(plan, 10, np.int64)
    parts, slots = flat(plan, 16, np.float32), plan[17]
    results, bests, masses = parts[: slots * D], parts[slots * D : slots * (D + 1)], parts[slots * (D + 1) :]
    return tables, spans, seen, positions, pieces, results, bests, masses
