"""Mamba-2's recurrence against its formula in float64, in pieces and trees; its cost, against numbers that count."""

import math
from typing import Any

import numpy as np
import pytest

from minillm.batch import BEGINNING, NO_SLOT, state_before
from minillm.reference import selective_scan
from minillm.reference.selective_scan import UNLIMITED, selective_scan_cost

from .test_cost import Number, empty, numbers

RNG = np.random.default_rng(0)
H, P, G, N = 4, 3, 2, 5
WIDTH = H * P + 2 * G * N


def line(x: Any, steps: Any, weight: Any, states: Any, first: int, last: int, limits: Any = UNLIMITED) -> Any:
    """One sequence's tokens, from the state in slot `first` or the beginning to that in slot `last`."""
    T = len(x)
    before = np.array([BEGINNING if first < 0 else state_before(first), *range(T - 1)])
    after = np.array([NO_SLOT] * (T - 1) + [last])
    out = np.empty((T, H * P), x.dtype)
    return selective_scan(x, steps, *weight, states, before, after, np, out, groups=G, limits=limits)


def drawn(T: int, kind: Any = np.float64) -> tuple[Any, Any, Any]:
    """Values with B and C, steps, and rates with biases."""
    shapes = (T, WIDTH), (T, H), (3, H)
    x, steps, weight = (RNG.standard_normal(shape).astype(kind) for shape in shapes)
    return x, steps, weight


@pytest.mark.parametrize("limits", [UNLIMITED, (0.5, 1.0)])
def test_each_head_decays_adds_and_reads_its_state(limits: tuple[float, float]) -> None:
    (x, steps, (decay, skip, bias)), states = drawn(9), np.zeros((1, H, P, N))
    ours = line(x, steps, (decay, skip, bias), states, BEGINNING, 0, limits)
    for h in range(H):
        S, group = np.zeros((P, N)), h // (H // G)
        for t in range(9):
            values = x[t, h * P :][:P]
            B, C = (x[t, H * P + (i * G + group) * N :][:N] for i in range(2))
            step = min(max(math.log(1 + math.exp(steps[t, h] + bias[h])), limits[0]), limits[1])
            S = math.exp(-math.exp(decay[h]) * step) * S + step * np.outer(values, B)
            np.testing.assert_allclose(ours[t, h * P :][:P], S @ C + skip[h] * values, rtol=0, atol=1e-12)
        np.testing.assert_allclose(states[0, h], S, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cuts", [[1], [5], [2, 3], [*range(1, 12)]])
def test_chunks_of_any_size_have_the_bits_of_one_pass(cuts: list[int]) -> None:
    x, steps, weight = drawn(12, np.float32)
    states = np.full((20, H, P, N), np.nan, np.float32)
    whole = line(x, steps, weight, states, BEGINNING, 0)
    slot, parts = BEGINNING, []
    for i, (first, stop) in enumerate(zip([0, *cuts], [*cuts, 12], strict=True)):
        parts.append(line(x[first:stop], steps[first:stop], weight, states, slot, i + 1))
        slot = i + 1
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(states[slot], states[0])


def test_a_tree_of_guesses_follows_its_branches() -> None:
    """Tokens 0 and 1 after a state, then a tree: 2 after 1, 3 after 2, 4 after 1, 5 after 4."""
    (x, steps, weight), states = drawn(6), RNG.standard_normal((2, H, P, N))
    before, after = np.array([state_before(1), 0, 1, 2, 1, 4]), np.full(6, NO_SLOT)
    ours = selective_scan(x, steps, *weight, states, before, after, np, np.empty((6, H * P)), groups=G)
    for branch in ([0, 1, 2, 3], [0, 1, 4, 5]):
        np.testing.assert_array_equal(ours[branch], line(x[branch], steps[branch], weight, states, 1, NO_SLOT))


def test_the_cost_is_what_the_numbers_count() -> None:
    T, before, after = 3, np.array([state_before(0), 0, 1]), np.full(3, NO_SLOT)
    x, steps, states = numbers(T, WIDTH), numbers(T, H), numbers(1, H, P, N)
    weight = numbers(H), numbers(H), numbers(H)
    Number.arithmetic = 0
    selective_scan(x, steps, *weight, states, before, after, np, empty(T, H * P), groups=G)
    sums = T * H * P  # one addition of each less
    cost = selective_scan_cost(T, H, P, G, N, 1)
    assert Number.arithmetic + sums == cost.flops
    state = 4 * H * P * N
    assert cost.bytes_read == 4 * T * (WIDTH + H) + 12 * H + state
    assert cost.bytes_written == 4 * T * H * P + state
