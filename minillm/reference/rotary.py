"""Rotary position embedding: rotates queries and keys by angles proportional to their position (Su et al., "RoFormer",
arXiv 2104.09864, section 3.2.2).

The first r of a head's D numbers form r / 2 pairs (j, j + r / 2). Pair j at position p is rotated by the angle p f_j,
so that the product of a query and a key depends only on the distance between their positions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..batch import Batch
from .cost import Cost


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """NTK scaling of kind "dynamic": lower frequencies for texts longer than in training.

    For a text of S > original tokens the base b becomes b a^(r / (r - 2)), with
    a = factor S / original - (factor - 1); so f_j is divided by a^(2 j / (r - 2)). Cached keys keep the frequencies of
    the length at which they were computed, as in transformers. So beyond `original` tokens results with and without the
    cache differ, and prefix cache and speculation are off, since they assume equal keys
    (`ModelConfig.keys_follow_length`).
    """

    factor: float
    original: int
    """Length in tokens up to which frequencies are unchanged"""

    def growth(self, batch: Batch) -> Any:
        """a of each new token, from the length of its whole text. -> [T] float32"""
        lengths = text_lengths(batch)
        growth = self.factor * lengths / self.original - (self.factor - 1)
        return np.where(lengths > self.original, growth, 1).astype(np.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotation:
    """Frequencies and scale of the rotation."""

    frequencies: Any
    """f [r / 2], float32: radians from one position to the next, as the backend keeps them; with `short` [2, r / 2],
    the second row for texts that are longer"""
    scale: float = 1.0
    """Factor of cosines and sines ("attention factor" of YaRN, arXiv 2309.00071, section 3.4)"""
    stretch: Stretch | None = None
    short: int | None = None
    """Length in tokens up to which a text has the first of two rows of frequencies (LongRoPE, arXiv 2402.13753)"""

    @property
    def pairs(self) -> int:
        """r / 2"""
        pairs: int = self.frequencies.data.shape[-1]
        return pairs

    def growth(self, batch: Batch) -> Any:
        """The number that frequencies take from a text's length, for each token [T] float32; None if they take none.

        With a stretch its a; with two rows of frequencies the number of the row, 0 or 1.
        """
        if self.short is not None:
            return (text_lengths(batch) > self.short).astype(np.float32)
        return None if self.stretch is None else self.stretch.growth(batch)


def text_lengths(batch: Batch) -> Any:
    """Length of each new token's whole text. -> [T]"""
    spans = batch.spans
    return np.repeat([span.text_len for span in spans], [span.stop - span.start for span in spans])  # [N] -> [T]


def angles(positions: Any, frequencies: Any, growth: Any, xp: Any) -> Any:
    """Angles p f_j, with f_j / a^(2 j / (r - 2)) for f_j if there is a growth a.

    Args:
        positions: [T]
        frequencies: [r / 2], or two rows [2, r / 2]
        growth: [T] or None; with two rows of frequencies, each token's row number
        xp: the array module

    Returns:
        [T, r / 2], float32
    """
    half = frequencies.shape[-1]
    if frequencies.ndim == 2:
        frequencies = frequencies[xp.asarray(growth, dtype=xp.int64)]  # [2, r / 2] -> [T, r / 2]
    elif growth is not None:
        exponents = xp.arange(half, dtype=xp.float32) / xp.float32(max(half - 1, 1))
        frequencies = frequencies / growth[:, None] ** exponents  # [r / 2] -> [T, r / 2]
    return positions[:, None].astype(xp.float32) * frequencies  # [T], [r / 2] -> [T, r / 2]


def cosines_and_sines(positions: Any, frequencies: Any, growth: Any, scale: float, xp: Any) -> tuple[Any, Any]:
    """Scaled cosines and sines of each new token's angles; arguments as in `angles`. -> 2 x [T, r / 2]"""
    turns = angles(positions, frequencies, growth, xp)
    cosines, sines = xp.cos(turns), xp.sin(turns)
    if scale != 1:
        cosines *= scale
        sines *= scale
    return cosines, sines


def rotary(x: Any, cosines: Any, sines: Any, xp: Any, out: Any) -> Any:
    """Rotate each pair (x_j, x_(j + r/2)) of every head; numbers from r on are copied.

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


def rotary_cost(
    T: int,
    heads: int,
    D: int,
    half: int,
    *,
    scaled: bool,
    stretched: bool,
    number_bytes: int = 4,
    row: int | None = None,
) -> Cost:
    """Four products and two sums per pair and head; an angle, a cosine and a sine per pair and token.

    A scale takes two more per pair and token, a stretch two (a power and a division). Queries and keys of all `heads`
    are read and written once, frequencies and positions read once. `row`: a token's numbers in all heads, if not all
    have width D.
    """
    flops = 6 * T * heads * half + T * half * (3 + 2 * scaled + 2 * stretched)
    numbers = number_bytes * T * (heads * D if row is None else row)
    return Cost(flops, numbers + (4 * half + 8 * T if T else 0), numbers)
