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
        self._turns: tuple[Any, Any] = (None, None)

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
            frequencies, growth = rotation.frequencies.data, rotation.growth(batch)
            self._turns = ops.cosines_and_sines(batch.positions, frequencies, growth, rotation.scale, np)
            self._batch, self._rotation = batch, rotation
        _rotate_kernel()(with_whole_rows(q), with_whole_rows(k), *self._turns, q_out, k_out)
        return q_out, k_out


@cache
def _rotate_kernel() -> Any:
    rows, turns, out = types.Array(_FLOAT, 3, "A"), types.Array(_FLOAT, 2, "C"), types.Array(_FLOAT, 3, "C")
    return kernel(types.void(rows, rows, turns, turns, out, out), parallel=True)(_rotate)


def _rotate(q: Any, k: Any, cosines: Any, sines: Any, q_out: Any, k_out: Any) -> None:
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
