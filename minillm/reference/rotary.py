"""Rotary position embedding: queries and keys turn by an angle that grows with their position (Su et al., "RoFormer",
arXiv 2104.09864, section 3.2.2).

The first r of a head's D numbers are r / 2 pairs: number j and number j + r / 2. Pair j at position p turns by the
angle p f_j, so that the product of a query and a key depends on how far apart they stand, and not on where.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..batch import Batch
from .cost import Cost


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Frequencies that sink as a text outgrows the length of training: "dynamic" NTK scaling.

    For a text of S > original tokens the base b becomes b a^(r / (r - 2)), with
    a = factor S / original - (factor - 1); so f_j is divided by a^(2 j / (r - 2)). Keys that are in the cache already
    keep the frequencies of the length that they were computed at, as they do in transformers. So a text that
    outgrows `original` goes on otherwise with the cache than without, and there is neither a prefix cache nor
    speculation, which count on the same keys either way (`ModelConfig.keys_follow_length`).
    """

    factor: float
    original: int
    """Tokens up to which nothing is stretched"""

    def growth(self, batch: Batch) -> Any:
        """a of each new token, by the length of its whole text. -> [T] float32"""
        spans = batch.spans
        lengths = np.repeat([span.text_len for span in spans], [span.stop - span.start for span in spans])  # [N] -> [T]
        growth = self.factor * lengths / self.original - (self.factor - 1)
        return np.where(lengths > self.original, growth, 1).astype(np.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotation:
    """By how much queries and keys turn."""

    frequencies: Any
    """f [r / 2], float32: radians from one position to the next, as the backend keeps them"""
    scale: float = 1.0
    """Cosines and sines are multiplied by it ("attention factor" of YaRN, arXiv 2309.00071, section 3.4)"""
    stretch: Stretch | None = None

    def growth(self, batch: Batch) -> Any:
        """a of each new token [T], where frequencies depend on the length of the text; else None."""
        return None if self.stretch is None else self.stretch.growth(batch)


def angles(positions: Any, frequencies: Any, growth: Any, xp: Any) -> Any:
    """p f_j, with f_j / a^(2 j / (r - 2)) where there is a growth a.

    Args:
        positions: [T]
        frequencies: [r / 2]
        growth: [T] or None
        xp: the array module

    Returns:
        [T, r / 2], float32
    """
    half = len(frequencies)
    if growth is not None:
        exponents = xp.arange(half, dtype=xp.float32) / xp.float32(max(half - 1, 1))
        frequencies = frequencies / growth[:, None] ** exponents  # [r / 2] -> [T, r / 2]
    return positions[:, None].astype(xp.float32) * frequencies  # [T], [r / 2] -> [T, r / 2]


def cosines_and_sines(positions: Any, frequencies: Any, growth: Any, scale: float, xp: Any) -> tuple[Any, Any]:
    """Of each new token's angles, scaled; arguments as of `angles`. -> 2 x [T, r / 2]"""
    turns = angles(positions, frequencies, growth, xp)
    cosines, sines = xp.cos(turns), xp.sin(turns)
    if scale != 1:
        cosines *= scale
        sines *= scale
    return cosines, sines


def rotary(x: Any, cosines: Any, sines: Any, xp: Any, out: Any) -> Any:
    """Turn each pair (x_j, x_(j + r/2)) of every head; numbers from r on stay.

    Args:
        x: [T, heads, D]
        cosines: [T, r / 2], scaled
        sines: likewise
        xp: the array module
        out: [T, heads, D], filled and returned
    """
    half = cosines.shape[-1]
    cosines, sines = cosines[:, None], sines[:, None]  # [T, r / 2] -> [T, 1, r / 2]
    first, second = x[..., :half], x[..., half : 2 * half]
    xp.subtract(first * cosines, second * sines, out=out[..., :half])
    xp.add(second * cosines, first * sines, out=out[..., half : 2 * half])
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


def cost(T: int, heads: int, D: int, half: int, *, scaled: bool, stretched: bool, number_bytes: int = 4) -> Cost:
    """Four products and two sums for each pair of each head; for each pair of a token an angle, a cosine and a sine.

    A scale takes two more for each pair of a token; a stretch two (a power and a division). Queries and keys of all
    `heads` are read and written once, frequencies and positions read once.
    """
    flops = 6 * T * heads * half + T * half * (3 + 2 * scaled + 2 * stretched)
    numbers = number_bytes * T * heads * D
    return Cost(flops, numbers + (4 * half + 8 * T if T else 0), numbers)
