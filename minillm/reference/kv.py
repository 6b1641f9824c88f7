"""Writes new keys and values to the paged K/V cache."""

from typing import Any

from ..batch import Batch
from .cost import Cost


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


def cost(T: int, K: int, D: int, position_bytes: int, number_bytes: int = 4) -> Cost:
    """No arithmetic; 2 T K D numbers read, and T positions of the cache written."""
    return Cost(0, 2 * number_bytes * T * K * D, T * position_bytes)
