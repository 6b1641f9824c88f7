"""Launches the kernels of LoRA adapters, `kernels/cuda/low_rank.cu`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..low_rank import LowRankWeight
from .kernels import Kernels, or_null, row_stride
from .linear import ACTIVATIONS

THREADS = 128


class Stack(NamedTuple):
    """The matrices of all adapters for one projection, on the device, with room for the highest rank R."""

    down: Any
    """A [n, R, in], float32"""
    up: Any
    """B [n, R, out], float32, with the scale in it"""
    ranks: Any
    """[n] int32; 0 of an adapter that does not change this projection"""

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return int(self.down.nbytes + self.up.nbytes + self.ranks.nbytes)


def stack(changes: Sequence[LowRankWeight | None], empty: Callable[[tuple[int, ...], Any], Any], xp: Any) -> Stack:
    """Copy the matrices of adapters, by number, into one array each; `empty` allocates."""
    ranks = [0 if change is None else change.down.shape[0] for change in changes]
    inputs, outputs = next((each.down.shape[1], each.up.shape[0]) for each in changes if each is not None)
    down, up = (empty((len(ranks), max(ranks), width), np.float32) for width in (inputs, outputs))
    for i, change in enumerate(changes):
        if change is not None:
            down[i, : ranks[i]] = change.down.data
            up[i, : ranks[i]] = change.up.data.T  # [out, r] -> [r, out]
    return Stack(down, up, xp.asarray(np.array(ranks, np.int32)))


def add_low_rank(
    kernels: Kernels,
    y: Any,
    x: Any,
    changes: Stack,
    numbers: Any,
    h: Any,
    out: Any,
    *,
    activation: str | None = None,
    residual: Any | None = None,
) -> None:
    """out = activation(y + (x A^T) B^T) + residual, with the A and B of each row's adapter.

    Args:
        kernels: for the storage type of x
        y: [T, outputs], of x's type or float32
        x: [T, in]
        changes: of the projection
        numbers: [T] int32, of each row's adapter; -1: it has none
        h: [T, R] float32, scratch memory
        out: [T, outputs] of y's type, contiguous
        activation: a name in `linear.ACTIVATIONS`, or None
        residual: [T, outputs] of x's type, or None
    """
    (T, inputs), outputs = x.shape, y.shape[1]
    adapters, most, _ = changes.down.shape
    if T == 0:
        return
    float_out = {} if y.dtype == x.dtype else {"FLOAT_OUT": 1}
    sizes = map(np.int32, (adapters, most, inputs))
    args = (h, x, changes.down, numbers, changes.ranks, *sizes, row_stride(x))
    kernels.get("low_rank", "low_rank_down", **float_out)((most, T), (THREADS,), args)
    strides = row_stride(y), np.int32(0) if residual is None else row_stride(residual)
    arrays = out, y, h, changes.up, or_null(residual), numbers, changes.ranks
    sizes = map(np.int32, (adapters, most, outputs))
    args = (*arrays, *sizes, *strides, np.int32(ACTIVATIONS[activation]))
    kernels.get("low_rank", "low_rank_up", **float_out)((-(-outputs // THREADS), T), (THREADS,), args)
