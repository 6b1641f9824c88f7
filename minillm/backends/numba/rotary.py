"""Rotary position embedding: queries and keys of a layer in one call.

Angles, cosines and sines are those of the reference. They belong to a batch and are the same in every layer, so they
are computed once for it, by NumPy, and kept for the other layers.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from ... import reference
from ...batch import Batch
from ...reference.rotary import Rotation
from .arguments import matrix, row_at, share_of
from .compiling import shared_kernel
from .elementary import inner
from .launching import launch, rows_of
from .rows import shares_of_rows


class Rotary:
    """Runs `rotate`; keeps a batch's cosines and sines from layer to layer."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._turns: dict[Rotation, tuple[Any, Any]] = {}

    def refill(self, batch: Batch) -> None:
        """Update what a recorded step reads for its next batch, which is split like the one before."""
        self._batch = batch
        for rotation, turns in self._turns.items():
            for target, new in zip(turns, _turns(batch, rotation), strict=True):
                target[...] = new

    def rotate(
        self,
        q: NDArray[np.float32],
        k: NDArray[np.float32],
        batch: Batch,
        rotation: Rotation,
        q_out: NDArray[np.float32],
        k_out: NDArray[np.float32],
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Rotate queries and keys by their positions, as `Backend.rotary` defines it.

        Args:
            q: [T, H, D]; any row stride
            k: [T, K, D], likewise
            batch: positions, and lengths of texts if frequencies depend on them
            rotation: frequencies and scale
            q_out: [T, H, D], C-contiguous, filled and returned
            k_out: [T, K, D], likewise
        """
        if batch is not self._batch:
            self._batch, self._turns = batch, {}
        if rotation not in self._turns:
            self._turns[rotation] = _turns(batch, rotation)
        launch(
            _rotate_kernel(), rows_of(q_out), rows_of(k_out), rows_of(q), rows_of(k), q.shape[2],
            *self._turns[rotation],
            shares=shares_of_rows(q_out),
        )  # fmt: skip
        return q_out, k_out


def _turns(batch: Batch, rotation: Rotation) -> tuple[Any, Any]:
    """Cosines and sines of a batch, 2 x [T, r / 2]"""
    frequencies, growth = rotation.frequencies.data, rotation.growth(batch)
    cosines, sines = reference.cosines_and_sines(batch.positions, frequencies, growth, rotation.scale, np)
    return cosines, sines


@cache
def _rotate_kernel() -> int:
    return shared_kernel(types.float32)(_rotate)


def _rotate(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    D, cosines, sines = arguments[16], matrix(arguments, 17, np.float32), matrix(arguments, 21, np.float32)
    first, stop = share_of(arguments[1], share, shares)
    for t in range(first, stop):
        _rotate_row(row_at(arguments, 8, t), cosines[t], sines[t], D, row_at(arguments, 0, t))
        _rotate_row(row_at(arguments, 12, t), cosines[t], sines[t], D, row_at(arguments, 4, t))


@inner
def _rotate_row(row: Any, cosines: Any, sines: Any, D: int, out: Any) -> None:
    """Rotate all heads of a token. [heads D] -> [heads D]"""
    half = len(cosines)
    for first in range(0, len(row), D):
        x, y = row[first : first + D], out[first : first + D]
        for j in range(half):
            y[j] = x[j] * cosines[j] - x[j + half] * sines[j]
            y[j + half] = x[j + half] * cosines[j] + x[j] * sines[j]
        for j in range(2 * half, D):
            y[j] = x[j]
