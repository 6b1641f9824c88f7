"""Convolution with a state, against NumPy's own and a loop over single tokens; its cost, against numbers that count."""

from typing import Any

import numpy as np
import pytest

from minillm.batch import BEGINNING, NO_SLOT, state_before
from minillm.reference import convolve
from minillm.reference.activation import FLOPS_PER_ELEMENT
from minillm.reference.convolution import convolution_cost
from minillm.reference.cost import Cost

from .test_cost import Number, empty, numbers

RNG = np.random.default_rng(0)
C = 5


def line(x: Any, taps: Any, bias: Any, states: Any, first: int, last: int, **variant: Any) -> Any:
    """One sequence's tokens, from the state in slot `first` or the beginning to that in slot `last`."""
    T = len(x)
    before = np.array([BEGINNING if first < 0 else state_before(first), *range(T - 1)])
    after = np.array([NO_SLOT] * (T - 1) + [last])
    return convolve(x, taps, bias, states, before, after, np, np.empty((T, C), x.dtype), **variant)


@pytest.mark.parametrize("k", [2, 3, 7])
def test_each_channel_is_convolved_with_its_past(k: int) -> None:
    x, taps, bias = RNG.standard_normal((20, C)), RNG.standard_normal((k, C)), RNG.standard_normal(C)
    ours = line(x, taps, bias, np.zeros((1, k - 1, C)), BEGINNING, NO_SLOT)
    for c in range(C):
        expected = np.convolve(x[:, c], taps[::-1, c])[:20] + bias[c]
        np.testing.assert_allclose(ours[:, c], expected, rtol=0, atol=1e-12)


def test_gates_multiply_input_and_result() -> None:
    x, taps = RNG.standard_normal((9, 3 * C)), RNG.standard_normal((3, C))
    b, c, u = x[:, :C], x[:, C : 2 * C], x[:, 2 * C :]
    ours = line(x, taps, None, np.zeros((1, 2, C)), BEGINNING, NO_SLOT, gated=True)
    plain = line(b * u, taps, None, np.zeros((1, 2, C)), BEGINNING, NO_SLOT)
    np.testing.assert_allclose(ours, c * plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cuts", [[1], [5], [2, 3], [*range(1, 12)]])
@pytest.mark.parametrize("k", [2, 5])
def test_chunks_of_any_size_have_the_bits_of_one_pass(k: int, cuts: list[int]) -> None:
    x, taps = (RNG.standard_normal(shape).astype(np.float32) for shape in ((12, 3 * C), (k, C)))
    states = np.full((20, k - 1, C), np.nan, np.float32)
    whole = line(x, taps, None, states, BEGINNING, 0, gated=True, activation="silu")
    slot, parts = BEGINNING, []
    for i, (first, stop) in enumerate(zip([0, *cuts], [*cuts, 12], strict=True)):
        parts.append(line(x[first:stop], taps, None, states, slot, i + 1, gated=True, activation="silu"))
        slot = i + 1
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(states[slot], states[0])


def test_a_tree_of_guesses_follows_its_branches() -> None:
    """Tokens 0 and 1 after a state, then a tree: 2 after 1, 3 after 2, 4 after 1, 5 after 4."""
    x, taps, states = RNG.standard_normal((6, C)), RNG.standard_normal((4, C)), RNG.standard_normal((2, 3, C))
    before, after = np.array([state_before(1), 0, 1, 2, 1, 4]), np.full(6, NO_SLOT)
    ours = convolve(x, taps, None, states, before, after, np, np.empty((6, C)))
    for branch in ([0, 1, 2, 3], [0, 1, 4, 5]):
        np.testing.assert_array_equal(ours[branch], line(x[branch], taps, None, states, 1, NO_SLOT))


@pytest.mark.parametrize(("gated", "bias", "activation"), [(False, True, "silu"), (True, False, None)])
def test_the_cost_is_what_the_numbers_count(gated: bool, bias: bool, activation: str | None) -> None:
    T, k = 3, 4
    shift = numbers(C) if bias else None
    before, after = np.array([BEGINNING, 0, 1]), np.full(T, NO_SLOT)
    variant: dict[str, Any] = {"gated": gated, "activation": activation}
    Number.arithmetic = 0
    convolve(numbers(T, 3 * C if gated else C), numbers(k, C), shift, numbers(1, k - 1, C), before, after, np,
             empty(T, C), **variant)  # fmt: skip
    cost = convolution_cost(T, C, k, 2, bias=bias, **variant)
    assert Number.arithmetic == cost.flops
    state = 4 * 2 * (k - 1) * C
    assert cost.bytes_read == 4 * T * C * (3 if gated else 1) + 4 * C * (k + bias) + state
    assert cost.bytes_written == 4 * T * C + state
    assert cost.flops == T * C * (7 + bias + 2 * gated + (FLOPS_PER_ELEMENT["silu"] if activation else 0))
    assert cost + Cost(0) == cost
