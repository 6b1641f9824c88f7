"""The Mersenne Twister MT19937 and what PyTorch draws from it on a CPU: `torch.randperm` and `torch.randint(0, 2)`.

The generator is NumPy's (Matsumoto and Nishimura, "Mersenne Twister", 1998), seeded with the lower 32 bits of a seed by
the paper's `init_genrand`, as in PyTorch (ATen/core/MT19937RNGEngine.h). `randperm` is the shuffle of Fisher and Yates:
step i swaps places i and i + r[i] % (n - i), for the raw numbers r (ATen/native/TensorFactories.cpp).
"""

import threading

import numpy as np
from numpy.typing import NDArray

_generators = threading.local()
"""One generator for each thread: making one costs much more than seeding it"""


def raw(seed: int, count: int) -> NDArray[np.uint32]:
    """The first `count` random numbers of 32 bits. `seed`: any integer, modulo 2**32"""
    if not hasattr(_generators, "own"):
        _generators.own = np.random.RandomState(0)
    _generators.own.seed(seed % 2**32)
    numbers: NDArray[np.uint32] = _generators.own.randint(0, 2**32, count, np.uint32)
    return numbers


def bits(seed: int, count: int) -> NDArray[np.int64]:
    """`torch.randint(0, 2, (count,))` after `manual_seed(seed)`."""
    return (raw(seed, count) % 2).astype(np.int64)


def partners(seed: int, n: int, count: int) -> NDArray[np.int64]:
    """The places with which the first `count` places of n are swapped in turn. [count]"""
    places = np.arange(count, dtype=np.uint32)
    return (places + raw(seed, count) % (np.uint32(n) - places)).astype(np.int64)


def permutation_start(seed: int, n: int, count: int) -> NDArray[np.int64]:
    """The first `count` members of `torch.randperm(n)` after `manual_seed(seed)`. [count]"""
    moved: dict[int, int] = {}  # place -> the number that is there, where it is not its own
    start = []
    for i, j in enumerate(partners(seed, n, count).tolist()):
        start.append(moved.get(j, j))
        moved[j] = moved.get(i, i)
    return np.asarray(start, np.int64)


def starts_with(seed: int, n: int, count: int, number: int) -> bool:
    """Whether `number` is among the first `count` members of `torch.randperm(n)`, without the permutation itself."""
    swaps, place, done = partners(seed, n, count), number, 0
    while done < count:
        hits = np.flatnonzero(swaps[done : place + 1] == place)
        if len(hits):  # it comes to a place that is not swapped again
            return True
        if place >= count:
            return False
        place, done = int(swaps[place]), place + 1
    return False
