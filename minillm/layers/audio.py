"""The embedding of sound: two convolutions over frames, and positions (Whisper, arXiv 2212.04356, section 2.2)."""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight
from ..batch import Batch

WIDTH = 3
"""Rows under the window of each convolution"""


@dataclass(frozen=True, eq=False)
class AudioEmbedding:
    """Two convolutions with GELU over the frames of each sound, the second of stride 2, plus position embedding."""

    first: Weight
    """[E, 3 M]: what a window of three frames is multiplied by"""
    second: Weight
    """[E, 3 E]"""
    positions: Weight
    """[positions, E]"""

    def __call__(self, backend: Backend, batch: Batch) -> Any:
        """x = gelu(conv(gelu(conv(frames)))) + positions[i]. [2 T, M] -> [T, E]"""
        p = backend.embed(batch.positions, self.positions)  # [T] -> [T, E]; first, as in every pass
        windows = backend.unfold(batch.frames, WIDTH, batch)  # [2 T, M] -> [2 T, 3 M]
        x = backend.linear(windows, self.first, activation="gelu")  # [2 T, 3 M] -> [2 T, E]
        windows = backend.unfold(x, WIDTH, batch, stride=2)  # [2 T, E] -> [T, 3 E]
        return backend.linear(windows, self.second, activation="gelu", residual=p)  # [T, 3 E] -> [T, E]
