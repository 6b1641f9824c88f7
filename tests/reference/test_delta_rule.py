"""The gated delta rule against its formula in float64, in pieces and trees; its cost, against numbers that count."""

import math
from typing import Any

import numpy as np
import pytest

from minillm.batch import BEGINNING, NO_SLOT, state_before
from minillm.reference import delta_rule
from minillm.reference.delta_rule import chunked_delta_rule, delta_rule_cost

from .test_cost import Number, empty, numbers

RNG = np.random.default_rng(0)
K, V, DK, DV = 2, 4, 5, 3
WIDTH = 2 * K * DK + V * DV


def line(x: Any, gates: Any, weight: Any, states: Any, first: int, last: int) -> Any:
    """One sequence's tokens, from the state in slot `first` or the beginning to that in slot `last`."""
    T = len(x)
    before = np.array([BEGINNING if first < 0 else state_before(first), *range(T - 1)])
    after = np.array([NO_SLOT] * (T - 1) + [last])
    return delta_rule(x, gates, *weight, states, before, after, np, np.empty((T, V * DV), x.dtype), key_heads=K)


def drawn(T: int, kind: Any = np.float64) -> tuple[Any, Any, Any]:
    """Projections, gates, and rates with biases."""
    shapes = (T, WIDTH), (T, 2 * V), (2, V)
    x, gates, weight = (RNG.standard_normal(shape).astype(kind) for shape in shapes)
    return x, gates, weight


def test_each_head_decays_corrects_and_asks_its_matrix() -> None:
    (x, gates, (decay, bias)), states = drawn(9), np.zeros((1, V, DK, DV))
    ours = line(x, gates, (decay, bias), states, BEGINNING, 0)
    for h in range(V):
        S, group = np.zeros((DK, DV)), h // (V // K)
        for t in range(9):
            q, k = (x[t, (i * K + group) * DK :][:DK] for i in range(2))
            v = x[t, 2 * K * DK + h * DV :][:DV]
            q, k = (u / math.sqrt(u @ u + 1e-6) for u in (q, k))
            beta = 1 / (1 + math.exp(-gates[t, h]))
            S *= math.exp(-math.exp(decay[h]) * math.log1p(math.exp(gates[t, V + h] + bias[h])))
            S = S @ np.eye(DV) + np.outer(k, beta * (v - S.T @ k))
            np.testing.assert_allclose(ours[t, h * DV :][:DV], S.T @ q / math.sqrt(DK), rtol=0, atol=1e-12)
        np.testing.assert_allclose(states[0, h], S, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cuts", [[1], [5], [2, 3], [*range(1, 12)]])
def test_chunks_of_any_size_have_the_bits_of_one_pass(cuts: list[int]) -> None:
    x, gates, weight = drawn(12, np.float32)
    states = np.full((20, V, DK, DV), np.nan, np.float32)
    whole = line(x, gates, weight, states, BEGINNING, 0)
    slot, parts = BEGINNING, []
    for i, (first, stop) in enumerate(zip([0, *cuts], [*cuts, 12], strict=True)):
        parts.append(line(x[first:stop], gates[first:stop], weight, states, slot, i + 1))
        slot = i + 1
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(states[slot], states[0])


def test_a_tree_of_guesses_follows_its_branches() -> None:
    """Tokens 0 and 1 after a state, then a tree: 2 after 1, 3 after 2, 4 after 1, 5 after 4."""
    (x, gates, weight), states = drawn(6), RNG.standard_normal((2, V, DK, DV))
    before, after = np.array([state_before(1), 0, 1, 2, 1, 4]), np.full(6, NO_SLOT)
    ours = delta_rule(x, gates, *weight, states, before, after, np, np.empty((6, V * DV)), key_heads=K)
    for branch in ([0, 1, 2, 3], [0, 1, 4, 5]):
        np.testing.assert_array_equal(ours[branch], line(x[branch], gates[branch], weight, states, 1, NO_SLOT))


def test_the_cost_is_what_the_numbers_count() -> None:
    T, before, after = 3, np.array([state_before(0), 0, 1]), np.full(3, NO_SLOT)
    x, gates, decay, bias, states = (numbers(*shape) for shape in ((T, WIDTH), (T, 2 * V), (V,), (V,), (1, V, DK, DV)))
    Number.arithmetic = Number.comparisons = 0
    delta_rule(x, gates, decay, bias, states, before, after, np, empty(T, V * DV), key_heads=K)
    sums = T * (2 * K + 2 * V * DV)  # one addition of each less
    cost = delta_rule_cost(T, K, V, DK, DV, 1)
    assert Number.arithmetic + sums + Number.comparisons == cost.flops
    state = 4 * V * DK * DV
    assert cost.bytes_read == 4 * T * (WIDTH + 2 * V) + 8 * V + state
    assert cost.bytes_written == 4 * T * V * DV + state


@pytest.mark.parametrize("longest", [1, 4, 64])
def test_chunks_by_matrix_products_are_the_recurrence(longest: int) -> None:
    """A text that begins and keeps a state, one that goes on, and a tree of guesses after it."""
    (x, gates, weight), states = drawn(30, np.float32), RNG.standard_normal((4, V, DK, DV)).astype(np.float32)
    before, after = np.arange(-1, 29), np.full(30, NO_SLOT)
    before[12], before[27], after[9], after[11], after[26] = state_before(0), 25, 1, 2, 3
    expected_states, expected, ours = states.copy(), *(np.empty((30, V * DV), np.float32) for _ in range(2))
    delta_rule(x, gates, *weight, expected_states, before, after, np, expected, key_heads=K)
    chunked_delta_rule(x, gates, *weight, states, before, after, np, ours, key_heads=K, longest=longest)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(states, expected_states, rtol=0, atol=1e-5)
