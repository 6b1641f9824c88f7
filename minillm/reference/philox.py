"""The counter-based random number generator Philox4x32-10.

It has no state: a number is a function of key and counter, so draw number 1000 costs as much as draw number 1, in any
order, with the same bits on any machine. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2,
3" (SC 2011), section 3.3.

Key and counter in minillm (`lo` and `hi` are the halves of the 64-bit seed, every word has 32 bits):

    key     = (lo(seed), hi(seed))
    counter = (position, sequence, purpose, 0)

`position` is the index of the token in its sequence, prompt included; `sequence` is the index of the sequence in its
request; `purpose` distinguishes the draws at one position: 0 is the choice of the token itself, `BEAMS` the candidates
of a beam search, where `sequence` numbers the draws, `XTC` whether XTC removes the best tokens. A fourth word of 1
instead of 0 derives seeds (`fold_in`).

Only the first of the four result words is used. Its upper 23 bits `k` give the uniform (2 k + 1) / 2**24: never 0,
never 1, and exact in float32, so that a GPU kernel and NumPy agree bit for bit.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

BEAMS = 1
"""`purpose` of the draws of candidates in a sampling beam search."""
XTC = 2**16
"""`purpose` of XTC's draws."""
RESAMPLING = 2**16 + 1
"""`purpose` of the draw by which particles are resampled."""
PARTICLES = 2**17
"""`purpose` of the first draw of a particle's token; those that follow at its position have the next numbers."""

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
"""Key increments of each round: the golden ratio and sqrt(3) - 1, as fractions of 2**32."""
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox4x32(counter: ArrayLike, key: ArrayLike) -> NDArray[np.uint32]:
    """Four random words [..., 4] from `counter` [..., 4] and `key` [..., 2], all of 32 bits."""
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, np.uint64), -1, 0)
    k0, k1 = np.moveaxis(np.asarray(key, np.uint64), -1, 0)
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2  # below 2**64: both factors have 32 bits
        c0, c1, c2, c3 = (
            (product1 >> _WORD) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _WORD) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def uniform(seed: ArrayLike, sequence: ArrayLike, position: ArrayLike, purpose: ArrayLike = 0) -> NDArray[Any]:
    """One uniform number in (0, 1) for each key, float32; the arguments broadcast against each other.

    Args:
        seed: the request's seed, in [0, 2**64).
        sequence: index of the sequence within its request, in [0, 2**32).
        position: index of the token within its sequence, prompt included, in [0, 2**32).
        purpose: which of the draws at this position, in [0, 2**32).
    """
    seeds, sequences, positions, purposes = np.broadcast_arrays(
        *(np.asarray(word, np.uint64) for word in (seed, sequence, position, purpose))
    )
    counter = np.stack([positions, sequences, purposes, np.zeros_like(positions)], axis=-1)  # [...] -> [..., 4]
    key = np.stack([seeds & _LOW, seeds >> _WORD], axis=-1)  # [...] -> [..., 2]
    k = philox4x32(counter, key)[..., 0] >> np.uint32(9)  # [..., 4] -> [...]
    return (2 * k + np.uint32(1)).astype(np.float32) * np.float32(2**-24)


def fold_in(seed: int, index: int) -> int:
    """The seed of prompt `index` of a list with one seed: the seed itself for the first, another for each further one.

    Named after JAX's function. Of n prompts two share a seed with probability n**2 / 2**65.

    Args:
        seed: the list's seed, in [0, 2**64)
        index: index of the prompt in the list, in [0, 2**32)
    """
    if index == 0:
        return seed  # a prompt alone and the first of a list draw the same
    low, high, *_ = philox4x32([index, 0, 0, 1], [seed & 0xFFFFFFFF, seed >> 32])
    return int(high) << 32 | int(low)


class Keys(NamedTuple):
    """Keys of several draws: arguments of `uniform`."""

    seeds: NDArray[np.uint64]
    """[R]"""
    sequences: NDArray[Any]
    """[R]"""
    positions: NDArray[Any]
    """[R]"""
    purpose: int = 0

    def uniforms(self) -> NDArray[Any]:
        """One uniform number for each draw. [R] float32"""
        return uniform(*self)
