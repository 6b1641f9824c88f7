"""Filing new keys and values in the cache."""

from typing import Any

from ..batch import Batch
from .cost import Cost


def store_kv(k: Any, v: Any, keys: Any, values: Any, batch: Batch) -> None:
    """Write each token's key and value into its slot: page and offset of `batch`.

    Args:
        k: [T, K, D]
        v: [T, K, D]
        keys: this layer's pages [pages, K, P, D], changed in place
        values: likewise
        batch: the slots
    """
    keys[batch.slot_pages, :, batch.slot_offsets] = k
    values[batch.slot_pages, :, batch.slot_offsets] = v


def cost(T: int, K: int, D: int) -> Cost:
    """No arithmetic; 2 T K D numbers read and written."""
    return Cost(0, 8 * T * K * D, 8 * T * K * D)
