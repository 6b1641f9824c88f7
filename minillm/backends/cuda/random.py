"""Random weights generated on the device (`kernels/cuda/random.cu`), so the host need not generate and send them."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..weights import RandomTensor
from .kernels import Kernels

THREADS = 256
BLOCKS = 4096
"""The most blocks; each covers the array in strides."""


class DrawnTensor(RandomTensor):
    """A matrix of random numbers to be generated on the device."""


def draw(kernels: Kernels, tensors: Sequence[DrawnTensor], out: Any) -> None:
    """Fill `out` [sum of rows, in] with the numbers of all tensors, one after the other along the first axis."""
    first = 0
    for tensor in tensors:
        key = np.random.SeedSequence([tensor.seed, zlib.crc32(tensor.name.encode())]).generate_state(1, np.uint64)[0]
        fill_normal(kernels, out[first : first + tensor.shape[0]], int(key), tensor.std)
        first += tensor.shape[0]


def fill_normal(kernels: Kernels, out: Any, seed: int, std: float) -> None:
    """Normal random numbers of mean 0; number i depends on `seed` and i alone.

    Args:
        kernels: for the storage type of `out`
        out: contiguous, of any shape, at most 2^32 numbers; filled
        seed: 64 bits
        std: standard deviation
    """
    if out.size == 0:
        return
    assert out.size <= 1 << 32, "the counters have 32 bits"
    blocks = min(BLOCKS, -(-out.size // (4 * THREADS)))
    kernel = kernels.get("random", "fill_normal")
    kernel((blocks,), (THREADS,), (out, np.uint64(out.size), np.uint64(seed), np.float32(std)))
