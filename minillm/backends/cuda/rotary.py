"""Launches rotary position embedding (`kernels/rotary.cu`)."""

from typing import Any, Protocol

import numpy as np

from ...reference.rotary import Rotation
from .kernels import NULL, Kernels
from .kv import row_stride

BLOCK = 256


class Texts(Protocol):
    """The arrays of a batch that rotation reads, int32 on the device."""

    @property
    def positions(self) -> Any:
        """[T], from 0"""

    @property
    def text_lens(self) -> Any:
        """[N]: length of each sequence's whole text; read if the rotation has a `stretch`"""

    @property
    def query_starts(self) -> Any:
        """[N + 1]: sequence i owns the rows query_starts[i] : query_starts[i + 1]"""


def rotary(kernels: Kernels, q: Any, k: Any, batch: Texts, rotation: Rotation, q_out: Any, k_out: Any) -> None:
    """Rotate queries and keys by their positions, in one launch (`reference.rotary`).

    Args:
        kernels: for the storage type of q and k
        q: [T, H, D], or a view with a larger row stride
        k: [T, K, D], likewise
        batch: of T tokens
        rotation: with its frequencies on the device
        q_out: [T, H, D], filled; contiguous
        k_out: [T, K, D], likewise
    """
    T, H, D = q.shape
    if T == 0:
        return
    frequencies, stretch = rotation.frequencies.data, rotation.stretch
    half, N = len(frequencies), len(batch.query_starts) - 1
    assert 2 * half <= D, "no more numbers turn than a head has"
    shared = 2 * half * 4
    texts = (NULL, NULL) if stretch is None else (batch.text_lens, batch.query_starts)
    arrays = (q_out, k_out, q, k, batch.positions, frequencies, *texts)
    sizes = (*map(np.int32, (N, H, k.shape[1], D, half)), row_stride(q), row_stride(k))
    factor, original = (1.0, 0) if stretch is None else (stretch.factor, stretch.original)
    numbers = np.float32(rotation.scale), np.float64(factor), np.int32(original)
    kernel = kernels.get("rotary", "rotary", shared_mem=shared)
    kernel((T,), (BLOCK,), (*arrays, *sizes, *numbers), shared_mem=shared)
