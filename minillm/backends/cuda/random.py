"""Random weights generated on the device (`kernels/cuda/random.cu`), so the host need not generate and send them."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..loader import RandomTensor
from .kernels import Kernels

THREADS = 256
BLOCKS = 4096
"""The most blocks; each covers the array in strides."""


class DrawnTensor(RandomTensor):
    """A matrix of random numbers to be generated on the device."""

    @property
    def key(self) -> int:
        """The seed of its own numbers, 64 bits."""
        return int(np.random.SeedSequence([self.seed, zlib.crc32(self.name.encode())]).generate_state(1, np.uint64)[0])


def draw(kernels: Kernels, tensors: Sequence[DrawnTensor], out: Any) -> None:
    """Fill `out` [sum of rows, in] with the numbers of all tensors, one after the other along the first axis."""
    first = 0
    for tensor in tensors:
        fill_normal(kernels, out[first : first + tensor.shape[0]], tensor.key, tensor.std)
        first += tensor.shape[0]


def draw_integers(kernels: Kernels, tensors: Sequence[DrawnTensor], values: Any, scales: Any) -> None:
    """Fill a matrix of 8 or 4 bits with random integers, all as likely, and each tensor's scale.

    Args:
        kernels: of any storage type
        tensors: one after the other along the first axis
        values: [sum of rows, bytes], int8, or uint8 with two integers each
        scales: [sum of rows, groups] float16
    """
    spread = np.std(np.arange(-128, 128) if values.dtype == np.int8 else np.arange(-8, 8))
    first = 0
    for tensor in tensors:
        part = slice(first, first + tensor.shape[0])
        fill_bits(kernels, values[part], tensor.key)
        scales[part] = np.float16(tensor.std / spread)
        first = part.stop


def fill_bits(kernels: Kernels, out: Any, seed: int) -> None:
    """Random bits; word number i depends on `seed` and i alone.

    Args:
        kernels: of any storage type
        out: contiguous, of any shape and type, a multiple of 16 and at most 2^34 bytes; filled
        seed: 64 bits
    """
    words = out.reshape(-1).view(np.uint32)
    if words.size == 0:
        return
    assert words.size % 4 == 0 and words.size <= 1 << 32, "the counters have 32 bits"
    blocks = min(BLOCKS, -(-words.size // (4 * THREADS)))
    kernel = kernels.get("random", "fill_bits")
    kernel((blocks,), (THREADS,), (words, np.uint64(words.size // 4), np.uint64(seed)))


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
