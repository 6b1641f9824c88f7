"""Random tensors instead of stored ones: models of a published shape, for benchmarks and tests."""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .weights import CHUNK, Rearranged


@dataclass(frozen=True)
class RandomTensor:
    """A tensor of normal random numbers, the same for the same seed and name."""

    name: str
    shape: tuple[int, ...]
    seed: int
    std: float
    dtype = "float32"

    def stored(self) -> NDArray[np.float32]:
        """The numbers, float32."""
        return self.load()

    def followed_by(self, other: Any) -> None:
        """Always None: there is no file."""

    def part(self, axis: int, first: int, stop: int) -> Rearranged:
        """Rows or columns `first` to `stop`: the numbers that they have in the whole tensor."""
        return Rearranged(self, lambda whole: whole).part(axis, first, stop)

    def load(self) -> NDArray[np.float32]:
        """The numbers, float32."""
        out = np.empty(self.shape, np.float32)
        self.read_into(out)
        return out

    def read_into(self, out: NDArray[np.float32]) -> None:
        """Fill `out` with the numbers. A norm's gain is drawn around 1."""
        first = 0
        for chunk in self.chunks():
            out[first : first + len(chunk)] = chunk
            first += len(chunk)

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The numbers, some rows at a time."""
        rng = np.random.default_rng([self.seed, zlib.crc32(self.name.encode())])
        rows = max(1, CHUNK // max(1, math.prod(self.shape[1:])))
        for first in range(0, self.shape[0], rows):
            chunk = rng.standard_normal((min(rows, self.shape[0] - first), *self.shape[1:]), np.float32)
            chunk *= self.std
            if len(self.shape) == 1 and self.name.endswith(".weight"):
                chunk += 1
            yield chunk
