"""Attention of many queries at once (prefill): tiles of 64 query rows against blocks of 64 keys.

Queries are in the lanes of vectors: scores are [keys, lanes], the result [D, lanes]. So a softmax over the keys runs
for all lanes together and needs no sum across a vector, and both products are the same operation with a known length. Q
is transposed once for each tile, keys and values never.

The softmax is taken block by block (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135): scores
beyond one block are never stored. A query's result does not depend on what else is in its tile: blocks of keys begin
at fixed positions.
"""

from typing import Any

import numpy as np

from .arguments import matrix, number, row_at, stored_vectors, vector
from .elementary import exp, inner, scale_at, widen
from .register_tile import ROWS, VECTOR, WIDE, add_narrow, add_wide

LANES = 64
"""Query rows in a tile: (query, head) pairs of one K/V head, the heads of a query together."""
BLOCK = 64
"""Keys in a block."""

_QUERIES, _OUT = 22, 50
"""Argument numbers of queries and result in `attend_tiles`."""
_NOTHING = np.float32(-np.inf)
_ZERO = np.float32(0)


def scratch_size(D: int) -> int:
    """float32 numbers that one worker needs."""
    width = -(-D // ROWS) * ROWS
    return LANES * (BLOCK + 2 * width + 5) + BLOCK * width


@inner
def _add_products(c: Any, a: Any, a_row: int, a_column: int, b: Any, rows: int, count: int, lanes: int) -> None:
    """c[m, i] += sum over k of a[m a_row + k a_column] b[k, i] for m < rows (rounded up to 4) and i < lanes."""
    for m in range(0, rows, ROWS):
        first = 0
        while lanes - first >= WIDE * VECTOR:
            add_wide(c[m * LANES + first :], a[m * a_row :], a_row, a_column, b[first:], LANES, count)
            first += WIDE * VECTOR
        while first < lanes:
            add_narrow(c[m * LANES + first :], a[m * a_row :], a_row, a_column, b[first:], LANES, count)
            first += VECTOR


@inner
def _load_block(pages: Any, table: Any, head: int, first: int, size: int, width: int, out: Any) -> None:
    """Load positions first : first + size of one head as float32, [size, width]."""
    data, scales = pages
    P, D = data.shape[2:]
    done = 0
    while done < size:
        page, offset = table[(first + done) // P], (first + done) % P
        here = min(size - done, P - offset)
        for j in range(here):
            source, target = data[page, head, offset + j], out[(done + j) * width :]
            scale = scale_at(scales, page, head, offset + j)
            for d in range(D):
                target[d] = widen(source[d]) * scale
        done += here


@inner
def _window_begins(window: Any, positions: Any) -> Any:
    """The first key that any query at `positions` sees, and the first that all of them see."""
    return max(0, positions.min() - window + 1), max(0, positions.max() - window + 1)


@inner
def _lower(
    scores: Any, first: int, size: int, row: int, rows: int, lanes: int, G: int, head: int, span: Any, positions: Any,
    slopes: Any, scratch: Any,
) -> None:  # fmt: skip
    """ALiBi, if there are slopes: lower each score by its head's slope times the distance to the key."""
    if len(slopes):
        start, n, S, m, _ = span
        slope, place = scratch[:LANES], scratch[LANES : 2 * LANES]
        for lane in range(rows):
            slope[lane] = slopes[head * G + (row + lane) % G]
            place[lane] = positions[start + (row + lane) // G]
        for j in range(size):
            key = first + j
            position = np.float32(key if key < S - m else positions[start + n - S + key])
            line = scores[j * LANES : j * LANES + LANES]
            for i in range(lanes):
                line[i] -= slope[i] * (place[i] - position)


@inner
def _hide(
    scores: Any, first: int, size: int, row: int, rows: int, G: int, span: Any, seen: Any, positions: Any, window: Any
) -> None:
    """Set scores to -inf where a key is after its query, before its window, or in another branch of a tree."""
    start, n, S, m, mask = span
    for lane in range(rows):
        query = (row + lane) // G
        visible = S - n + query + 1
        for j in range(max(0, visible - first), size):
            scores[j * LANES + lane] = _NOTHING
        begin, _ = _window_begins(window, positions[start + query : start + query + 1])
        for j in range(min(size, begin - first)):
            scores[j * LANES + lane] = _NOTHING
        branch = query - (n - m)
        if branch >= 0:
            for j in range(max(0, S - m - first), min(size, visible - first)):
                if not seen[mask + branch * m + first + j - (S - m)]:
                    scores[j * LANES + lane] = _NOTHING


@inner
def _softmax(scores: Any, size: int, lanes: int, best: Any, mass: Any, shrink: Any) -> None:
    """Turn scores into weights exp(score - best), and update `best` and `mass` of each lane.

    `shrink` is the factor for earlier results, which were relative to the previous maximum.
    """
    for i in range(lanes):
        shrink[i] = best[i]
    for j in range(size):
        row = scores[j * LANES : j * LANES + LANES]
        for i in range(lanes):
            best[i] = row[i] if row[i] > best[i] else best[i]
    for i in range(lanes):
        base = best[i] if best[i] != _NOTHING else _ZERO  # nothing seen yet: all weights 0, and not NaN
        shrink[i] = exp(shrink[i] - base)
        mass[i] *= shrink[i]
    for j in range(size):
        row = scores[j * LANES : j * LANES + LANES]
        for i in range(lanes):
            base = best[i] if best[i] != _NOTHING else _ZERO
            weight = exp(row[i] - base)
            row[i] = weight
            mass[i] += weight


@inner
def _load_queries(
    arguments: Any, start: int, head: int, G: int, D: int, row: int, rows: int, scale: Any, queries: Any
) -> None:
    """Load one query row into each lane, scaled. -> [D, lanes]"""
    queries[:] = _ZERO
    for lane in range(rows):
        query = row_at(arguments, _QUERIES, start + (row + lane) // G)[(head * G + (row + lane) % G) * D :]
        for d in range(D):
            queries[d * LANES + lane] = query[d] * scale


@inner
def _attend_tile(
    arguments: Any, keys: Any, values: Any, rule: Any, table: Any, span: Any, seen: Any, positions: Any, row: int,
    head: int, G: int, scratch: Any,
) -> None:  # fmt: skip
    """Compute one tile: rows `row` and up to 63 more of the n G rows that belong to one K/V head of one sequence.

    The rule is (scale, window, slopes).
    """
    D = keys[0].shape[3]
    start, n, S, m, _ = span
    scale, window, slopes = rule
    width = -(-D // ROWS) * ROWS
    rows = min(LANES, n * G - row)
    lanes = -(-rows // VECTOR) * VECTOR
    scores, rest = scratch[: BLOCK * LANES], scratch[BLOCK * LANES :]
    queries, rest = rest[: width * LANES], rest[width * LANES :]
    result, rest = rest[: width * LANES], rest[width * LANES :]
    best, mass, shrink = rest[:LANES], rest[LANES : 2 * LANES], rest[2 * LANES : 3 * LANES]
    lowering, block = rest[3 * LANES : 5 * LANES], rest[5 * LANES :]
    _load_queries(arguments, start, head, G, D, row, rows, scale, queries)
    result[:] = _ZERO
    block[:] = _ZERO
    best[:] = _NOTHING
    mass[:] = _ZERO
    first_visible, last_visible = S - n + row // G + 1, S - n + (row + rows - 1) // G + 1
    begin, all_begun = _window_begins(window, positions[start + row // G : start + (row + rows - 1) // G + 1])
    for first in range(begin // BLOCK * BLOCK, last_visible, BLOCK):
        size = min(BLOCK, last_visible - first)
        _load_block(keys, table, head, first, size, width, block)
        scores[:] = _ZERO
        _add_products(scores, block, width, 1, queries, size, D, lanes)
        _lower(scores, first, size, row, rows, lanes, G, head, span, positions, slopes, lowering)
        if first + size > min(first_visible, S - m) or first < all_begun:
            _hide(scores, first, size, row, rows, G, span, seen, positions, window)
        _softmax(scores, size, lanes, best, mass, shrink)
        for d in range(D):
            line = result[d * LANES : d * LANES + LANES]
            for i in range(lanes):
                line[i] *= shrink[i]
        _load_block(values, table, head, first, size, width, block)
        _add_products(result, block, 1, width, scores, D, size, lanes)
    for lane in range(rows):
        target = row_at(arguments, _OUT, start + (row + lane) // G)[(head * G + (row + lane) % G) * D :]
        for d in range(D):
            target[d] = result[d * LANES + lane] / mass[lane]


def attend_tiles(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """Kernel for sequences with many queries: a share is one tile of one K/V head.

    Arguments, in order: keys, values and their scales, as `arguments.stored_vectors` takes them; queries [T, H D];
    scale; window; slopes [H] or nothing; block tables, spans, all trees' masks, positions, as `attention_rows` has
    them in its plan; tiles [tiles, 2]: sequence, first (query, head) row; scratch [workers, scratch_size]; out
    [T, H D].
    """
    keys, values = stored_vectors(arguments, 0, 12, data), stored_vectors(arguments, 6, 17, data)
    K, D = keys[0].shape[1], keys[0].shape[3]
    G = arguments[_QUERIES + 2] // D // K
    rule = np.float32(number(arguments[26])), arguments[27], vector(arguments, 28, np.float32)
    tables, spans = matrix(arguments, 30, np.int64), matrix(arguments, 34, np.int64)
    seen, positions = vector(arguments, 38, np.bool_), vector(arguments, 40, np.int64)
    tiles, scratch = matrix(arguments, 42, np.int64), matrix(arguments, 46, np.float32)
    sequence, row = tiles[share // K]
    _attend_tile(
        arguments, keys, values, rule, tables[sequence], spans[sequence], seen, positions, row, share % K, G,
        scratch[worker],
    )  # fmt: skip
