"""Philox against the published known answers, and its uniforms against what uniform and independent mean."""

import numpy as np
import pytest

from minillm.reference.philox import fold_in, philox4x32, uniform

from .chi_square import p_value

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
def test_known_answers_of_random123(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox4x32(counter, key).tolist() == expected


def test_many_counters_at_once_equal_one_at_a_time() -> None:
    counters = np.arange(24).reshape(2, 3, 4)
    keys = np.arange(6).reshape(3, 2)
    together = philox4x32(counters, keys)
    for i in range(2):
        for j in range(3):
            assert together[i, j].tolist() == philox4x32(counters[i, j], keys[j]).tolist()


def test_key_and_counter_are_laid_out_as_documented() -> None:
    word = philox4x32([5, 3, 2, 0], [0x9ABCDEF0, 0x12345678])[0]
    assert float(uniform(0x123456789ABCDEF0, sequence=3, position=5, purpose=2)) == ((int(word) >> 9) + 0.5) / 2**23


def test_uniforms_are_float32_strictly_between_0_and_1() -> None:
    u = uniform(7, 0, np.arange(200_000))
    assert u.dtype == np.float32
    assert 0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    assert (u.astype(np.float64) * 2**24 % 2 == 1).all()  # (2 k + 1) / 2**24, exactly


def test_the_whole_seed_counts() -> None:
    draws = {float(uniform(seed, 0, 0)) for seed in (0, 1, 2**31, 2**32, 2**63, 2**64 - 1)}
    assert len(draws) == 6


@pytest.mark.parametrize("axis", ["seed", "sequence", "position", "purpose"])
def test_equidistributed_and_independent_along_every_part_of_the_key(axis: str) -> None:
    n = 40_000
    u = uniform(**{"seed": 11, "sequence": 2, "position": 3, "purpose": 0, axis: np.arange(n)})
    bins = (u * 16).astype(int)
    assert p_value(np.bincount(bins, minlength=16), np.full(16, n / 16)) > 1e-3
    neighbours = np.bincount(bins[:-1:2] * 16 + bins[1::2], minlength=256)  # disjoint pairs
    assert p_value(neighbours, np.full(256, n / 2 / 256)) > 1e-3


@pytest.mark.parametrize("axis", ["seed", "sequence", "purpose"])
def test_neighbouring_streams_are_independent(axis: str) -> None:
    n = 20_000
    key = {"seed": 11, "sequence": 2, "purpose": 0}
    first = uniform(**key, position=np.arange(n))
    second = uniform(**(key | {axis: key[axis] + 1}), position=np.arange(n))
    pairs = (first * 16).astype(int) * 16 + (second * 16).astype(int)
    assert p_value(np.bincount(pairs, minlength=256), np.full(256, n / 256)) > 1e-3


def test_the_tests_above_can_fail() -> None:
    n = 40_000
    correlated = np.repeat(uniform(11, 2, np.arange(n // 2)), 2)
    bins = (correlated * 16).astype(int)
    assert p_value(np.bincount(bins[:-1:2] * 16 + bins[1::2], minlength=256), np.full(256, n / 2 / 256)) < 1e-6
    skewed = uniform(11, 2, np.arange(n)) ** 1.05
    assert p_value(np.bincount((skewed * 16).astype(int), minlength=16), np.full(16, n / 16)) < 1e-6


@pytest.mark.longer
def test_the_prompts_of_a_list_draw_independently() -> None:
    """First draws of prompts with the seeds that are folded from one; the first prompt keeps the seed."""
    n = 3000
    seeds = [fold_in(2**64 - 5, index) for index in range(n)]
    assert seeds[0] == 2**64 - 5
    assert len({*seeds}) == n
    assert max(seeds) < 2**64
    bins = (uniform(np.asarray(seeds, np.uint64), 0, 9) * 8).astype(int)
    assert p_value(np.bincount(bins, minlength=8), np.full(8, n / 8)) > 1e-3
    neighbours = np.bincount(bins[:-1:2] * 8 + bins[1::2], minlength=64)  # disjoint pairs
    assert p_value(neighbours, np.full(64, n / 2 / 64)) > 1e-3
    low, high, *_ = philox4x32([3, 0, 0, 1], [7, 0])
    assert fold_in(7, 3) == int(high) * 2**32 + int(low)
