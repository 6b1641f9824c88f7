"""Mamba-2's recurrence in C against the reference: odd widths, texts that begin, go on and branch."""

from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cpu import launching

from .kernels import fill, run

BEFORE = np.array([-1, 0, 1, -2 - 4, 3, 4, -2, 6, 6, 7])
"""A text that begins, one that goes on from slot 4, and one from slot 0 that branches"""
AFTER = np.array([-1, 3, 1, -1, -1, 6, -1, 5, -1, -1])
LIMITS = 0.2, 1.5


def drawn(T: int, H: int, P: int, G: int, N: int) -> tuple[Any, ...]:
    """Values and steps, each some columns of wider rows; rates, biases, states."""
    rng, width = np.random.default_rng(P), H * P + 2 * G * N
    shapes = (T, width + 3), (T, H + 1), (2 * H,), (H,), (7, H, P, N)
    x, steps, rates, bias, states = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x[:, :width], steps[:, 1:], rates, bias, states


def scan(x: Any, steps: Any, rates: Any, bias: Any, states: Any, G: int, *places: Any, shares: int = 1) -> Any:
    _, H, P, N = states.shape
    before, after = places or (BEFORE, AFTER)
    out = np.full((len(x), H * P), np.nan, np.float32)
    arguments = fill(
        launching.SelectiveScan, x=x, steps=steps, rates=rates, step_bias=bias, states=states, before=before,
        after=after, out=out, T=len(x), H=H, P=P, G=G, N=N, stride=x.strides[0] // 4,
        step_stride=steps.strides[0] // 4, least=LIMITS[0], most=LIMITS[1],
    )  # fmt: skip
    run("selective_scan", arguments, shares)
    return out


@pytest.mark.parametrize(("H", "P", "G", "N"), [(1, 1, 1, 1), (4, 37, 2, 33), (2, 64, 1, 128), (3, 5, 3, 256)])
def test_results_and_states_are_the_references(H: int, P: int, G: int, N: int) -> None:
    x, steps, rates, bias, states = drawn(10, H, P, G, N)
    reference_states, again = states.copy(), states.copy()
    given = x, steps, *rates.reshape(2, H), bias, reference_states, BEFORE, AFTER
    out = np.empty((10, H * P), np.float32)
    expected = reference.selective_scan(*given, np, out, groups=G, limits=LIMITS)
    ours = scan(x, steps, rates, bias, states, G)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6 * max(1, np.abs(expected).max()))
    np.testing.assert_allclose(states, reference_states, rtol=0, atol=1e-6 * np.abs(reference_states).max())
    np.testing.assert_array_equal(scan(x, steps, rates, bias, again, G, shares=4), ours)
    np.testing.assert_array_equal(again, states)


def test_a_token_has_the_same_bits_after_a_state_and_in_one_pass() -> None:
    x, steps, rates, bias, states = drawn(10, 4, 20, 2, 37)
    states[...] = np.nan
    line = np.array([-1, *range(9)]), np.array([-1] * 9 + [0])
    whole = scan(x, steps, rates, bias, states, 2, *line)
    for t in range(10):
        places = np.array([-1 if not t else -2 - (1 + t % 2)]), np.array([1 + (t + 1) % 2])
        row = scan(x[t : t + 1], steps[t : t + 1], rates, bias, states, 2, *places)[0]
        np.testing.assert_array_equal(row, whole[t])
    np.testing.assert_array_equal(states[1 + 10 % 2], states[0])
