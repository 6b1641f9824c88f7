"""Disentangled attention: scores of a query's and of a key's content with the other's relative position.

    score(i, j) = scale (q_i . k_j  +  q_i . a[row(i - j)]  +  k_j . b[row(i - j)])

where q and k are the projections of two tokens, and a and b those of a table of relative positions, one vector for each
row (DeBERTa: He et al., arXiv 2006.03654, section 3.1; its log buckets: He et al., arXiv 2111.09543). The two further
terms are called content-to-position and position-to-content; either may be missing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class RelativePositions:
    """The projected relative positions of one layer. Arrays here; in a layer weights."""

    keys: Any | None
    """a, which queries see. [H, R, D]; None: no such term"""
    queries: Any | None
    """scale b, which keys are seen by. [H, R, D]; None: no such term"""
    rows: NDArray[np.int64]
    """Row of each distance from a key to its query, -M to M, which no text exceeds. [2 M + 1]"""
    parameters: tuple[Any, ...] = ()
    """The parameters that both were computed from, which no pass reads"""

    @property
    def terms(self) -> tuple[Any, ...]:
        """The two terms, without one that is missing. [H, R, D] each"""
        return tuple(term for term in (self.keys, self.queries) if term is not None)

    def with_arrays(self, array_of: Callable[[Any], Any]) -> "RelativePositions":
        """The same with an array in place of each weight."""
        keys, queries = (None if term is None else array_of(term) for term in (self.keys, self.queries))
        return replace(self, keys=keys, queries=queries)


def add_positions(
    scores: Any,
    q: Any,
    keys: Any,
    pages: tuple[int, ...],
    back: NDArray[np.int64],
    relative: RelativePositions,
    xp: Any,
) -> None:
    """Add the two terms to the scores of some queries of one sequence.

    Every query and every key is multiplied by all R positions, from whose products each pair takes its own.

    Args:
        scores: [H, n, S], changed in place
        q: queries times the scale [H, n, D]
        keys: [pages, H, P, D]
        pages: of the sequence
        back: distances from keys to queries [n, S]
        relative: the positions
        xp: the array module
    """
    n, S = back.shape
    rows = xp.asarray(relative.rows[back + len(relative.rows) // 2])  # [n, S]
    if relative.keys is not None:
        products = xp.matmul(q, relative.keys.swapaxes(1, 2))  # [H, n, D], [H, D, R] -> [H, n, R]
        scores += products[:, xp.arange(n)[:, None], rows]  # [H, n, R] -> [H, n, S]
    if relative.queries is not None:
        (H, R, _), P = relative.queries.shape, keys.shape[2]
        products = xp.empty((H, R, S), scores.dtype)
        for start, page in zip(range(0, S, P), pages, strict=False):
            size = min(P, S - start)
            page_keys = keys[page, :, :size].swapaxes(1, 2)  # [H, size, D] -> [H, D, size]
            xp.matmul(relative.queries, page_keys, out=products[:, :, start : start + size])
        scores += products[:, rows, xp.arange(S)]  # [H, R, S] -> [H, n, S]


def positions_flops(relative: RelativePositions, queries: int, keys: int) -> int:
    """FLOPs of the products: 2 D for each position with each query, with each key, and head."""
    H, R, D = relative.terms[0].shape
    rows = (queries if relative.keys is not None else 0) + (keys if relative.queries is not None else 0)
    return int(2 * H * R * D * rows)
