"""Launches the kernels that write keys and values to the cache and copy them within it."""

from typing import Any

import numpy as np

from .kernels import Kernels

BLOCK = 256


def store_kv(kernels: Kernels, k: Any, v: Any, keys: Any, values: Any, slots: Any) -> None:
    """Write each token's key and value into its slot.

    Args:
        kernels: for the storage type of the arrays
        k: [T, K, D], or a view with a larger row stride, as from a fused projection
        v: likewise
        keys: one layer's pages [pages, K, P, D], changed in place
        values: likewise
        slots: [T] int32: page * P + offset; -1 where nothing is to be stored
    """
    T, K, D = k.shape
    pages, _, P, _ = keys.shape
    if T == 0:
        return
    kernel = kernels.get("kv", "store_kv", HEAD_DIM=D, PAGE_SIZE=P)
    sizes = np.int32(K), np.int32(pages), row_stride(k), row_stride(v)
    kernel((T, 2), (BLOCK,), (keys, values, k, v, slots, *sizes))


def copy_positions(kernels: Kernels, keys: Any, values: Any, source: int, target: int, first: int, stop: int) -> None:
    """Copy the positions first : stop of a page to the same place in another page, in all layers.

    Args:
        kernels: for the storage type of the arrays
        keys: all layers' pages [L, pages, K, P, D], changed in place
        values: likewise
        source: the page to copy from
        target: the page to copy to, another one
        first: offset of the first position in both pages
        stop: offset after the last
    """
    L, pages, K, P, D = keys.shape
    if first == stop:
        return
    kernel = kernels.get("kv", "copy_positions", HEAD_DIM=D, PAGE_SIZE=P)
    sizes = (np.int32(number) for number in (K, pages, source, target, first, stop))
    kernel((L * K, 2), (BLOCK,), (keys, values, *sizes))


def row_stride(rows: Any) -> np.int32:
    """Row stride, in elements, of [T, heads, D] whose heads are contiguous."""
    assert rows.strides[1:] == (rows.shape[2] * rows.itemsize, rows.itemsize) or rows.shape[1] == 1
    return np.int32(rows.strides[0] // rows.itemsize)
