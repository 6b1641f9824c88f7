"""T5's bias of attention scores by the distance from query to key, in buckets (arXiv 1910.10683, section 2.1)."""

import math

import numpy as np
from numpy.typing import NDArray

from ..backends.operations import Backend
from ..backends.storage import expand
from ..backends.weights import Weight
from .parameters import Weights


def buckets_of(distances: NDArray[np.int64], buckets: int, max_distance: int, *, both: bool) -> NDArray[np.int64]:
    """The bucket of each distance from query to key (section 2.1): small ones alone, larger ones by logarithm.

    Args:
        distances: distances of the key after the query; negative if it is before
        buckets: their number
        max_distance: from where on all are in the last one
        both: an encoder, half of whose buckets are for keys after the query; else those are in the first
    """
    first = np.zeros_like(distances)
    if both:
        buckets //= 2
        first = np.where(distances > 0, buckets, 0)
    back = np.abs(distances) if both else np.maximum(-distances, 0)
    exact = buckets // 2
    # float32 throughout, as in transformers: distances at a boundary depend on the rounding
    ratio = np.log(np.maximum(back, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(max_distance / exact)
    )
    large = exact + (ratio * np.float32(buckets - exact)).astype(np.int64)
    return first + np.where(back < exact, back, np.minimum(large, buckets - 1))


def bias_by_distance(
    weights: Weights, backend: Backend, heads: int, buckets: int, max_distance: int, *, both: bool
) -> Weight:
    """The bias of a stack's scores by distance, -M to M, from each bucket's. [buckets, H] -> [H, 2 M + 1]"""
    table = weights.table("relative_attention_bias", buckets, heads, "positions", split="inputs")
    distances = np.arange(-max_distance, max_distance + 1)
    rows = backend.xp.asarray(buckets_of(distances, buckets, max_distance, both=both))
    return Weight(table.name, backend.xp.ascontiguousarray(expand(table.data, rows).T))  # [2 M + 1, H] -> [H, 2 M + 1]
