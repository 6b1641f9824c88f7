"""Rotary position embedding: queries and keys of a layer in one call.

Angles, cosines and sines are those of the reference. They belong to a batch and are the same in every layer, so they
are computed once for it, by NumPy, and kept for the other layers.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import prange, types
from numpy.typing import NDArray

from ... import ops
from ...batch import Batch
from ...ops.rotary import Rotation
from .compiling import kernel
from .elementary import inner, row_of, with_whole_rows
from .rows import THREADED

_FLOAT = types.float32


class Rotary:
    """Runs `rotate`; keeps a batch's cosines and sines from layer to layer."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._rotation: Rotation | None = None
        self._turns: NDArray[np.float32] = np.empty((2, 0, 0), np.float32)

    def rotate(
        self,
        q: NDArray[np.float32],
        k: NDArray[np.float32],
        batch: Batch,
        rotation: Rotation,
        q_out: NDArray[np.float32],
        k_out: NDArray[np.float32],
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Queries and keys turned by their positions, as `Backend.rotary` defines it.

        Args:
            q: [T, H, D]; rows may lie apart
            k: [T, K, D], likewise
            batch: positions, and lengths of texts where frequencies depend on them
            rotation: by how much
            q_out: [T, H, D], C-contiguous, filled and returned
            k_out: [T, K, D], likewise
        """
        if batch is not self._batch or rotation is not self._rotation:
            self._turns = cosines_and_sines(batch, rotation)
            self._batch, self._rotation = batch, rotation
        _rotate_kernel()(with_whole_rows(q), with_whole_rows(k), self._turns, q_out, k_out)
        return q_out, k_out


def cosines_and_sines(batch: Batch, rotation: Rotation) -> NDArray[np.float32]:
    """Of each new token's angles, scaled. -> [2, T, r / 2]"""
    growth = None if rotation.stretch is None else rotation.stretch.growth(batch)
    angles = ops.angles(batch.positions, rotation.frequencies.data, growth, np)  # [T] -> [T, r / 2]
    turns = np.empty((2, *angles.shape), np.float32)
    np.cos(angles, out=turns[0])
    np.sin(angles, out=turns[1])
    if rotation.scale != 1:
        turns *= np.float32(rotation.scale)
    return turns


@cache
def _rotate_kernel() -> Any:
    rows, out = types.Array(_FLOAT, 3, "A"), types.Array(_FLOAT, 3, "C")
    return kernel(types.void(rows, rows, out, out, out), parallel=True)(_rotate)


def _rotate(q: Any, k: Any, turns: Any, q_out: Any, k_out: Any) -> None:
    cosines, sines = turns[0], turns[1]
    if q.size < THREADED:
        for t in range(len(q)):
            _rotate_row(row_of(q, t), cosines[t], sines[t], q_out[t])
            _rotate_row(row_of(k, t), cosines[t], sines[t], k_out[t])
    else:
        for t in prange(len(q)):
            _rotate_row(row_of(q, t), cosines[t], sines[t], q_out[t])
            _rotate_row(row_of(k, t), cosines[t], sines[t], k_out[t])


@inner
def _rotate_row(row: Any, cosines: Any, sines: Any, out: Any) -> None:
    """All heads of a token. [heads D] -> out [heads, D]"""
    D, half = out.shape[1], len(cosines)
    for head in range(len(out)):
        x, y = row[head * D : head * D + D], out[head]
        for j in range(half):
            y[j] = x[j] * cosines[j] - x[j + half] * sines[j]
            y[j + half] = x[j + half] * cosines[j] + x[j] * sines[j]
        for j in range(2 * half, D):
            y[j] = x[j]
