"""The gated delta rule in C against the reference: odd widths, texts that begin, go on and branch."""

from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cpu import launching

from .kernels import fill, run

BEFORE = np.array([-1, 0, 1, -2 - 4, 3, 4, -2, 6, 6, 7])
"""A text that begins, one that goes on from slot 4, and one from slot 0 that branches"""
AFTER = np.array([-1, 3, 1, -1, -1, 6, -1, 5, -1, -1])


def drawn(T: int, K: int, V: int, dk: int, dv: int) -> tuple[Any, ...]:
    """Projections and gates, each some columns of wider rows; rates, biases, states."""
    rng, width = np.random.default_rng(dk), 2 * K * dk + V * dv
    shapes = (T, width + 3), (T, 2 * V + 1), (V,), (V,), (7, V, dk, dv)
    x, gates, decay, bias, states = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x[:, :width], gates[:, 1:], decay, bias, states


def delta_rule(x: Any, gates: Any, decay: Any, bias: Any, states: Any, K: int, *places: Any, shares: int = 1) -> Any:
    _, V, dk, dv = states.shape
    before, after = places or (BEFORE, AFTER)
    out = np.full((len(x), V * dv), np.nan, np.float32)
    arguments = fill(
        launching.DeltaRule, x=x, gates=gates, decay=decay, step_bias=bias, states=states, before=before, after=after,
        out=out, T=len(x), K=K, V=V, dk=dk, dv=dv, stride=x.strides[0] // 4, gate_stride=gates.strides[0] // 4,
    )  # fmt: skip
    run("delta_rule", arguments, shares)
    return out


@pytest.mark.parametrize(("K", "V", "dk", "dv"), [(1, 1, 1, 1), (2, 4, 37, 33), (2, 2, 128, 64), (1, 3, 256, 5)])
def test_results_and_states_are_the_references(K: int, V: int, dk: int, dv: int) -> None:
    x, gates, decay, bias, states = drawn(10, K, V, dk, dv)
    reference_states, again = states.copy(), states.copy()
    given = x, gates, decay, bias, reference_states, BEFORE, AFTER
    expected = reference.delta_rule(*given, np, np.empty((10, V * dv), np.float32), key_heads=K)
    ours = delta_rule(x, gates, decay, bias, states, K)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-6 * max(1, np.abs(expected).max()))
    np.testing.assert_allclose(states, reference_states, rtol=0, atol=3e-6 * np.abs(reference_states).max())
    np.testing.assert_array_equal(delta_rule(x, gates, decay, bias, again, K, shares=4), ours)
    np.testing.assert_array_equal(again, states)


def test_a_token_has_the_same_bits_after_a_state_and_in_one_pass() -> None:
    x, gates, decay, bias, states = drawn(10, 2, 4, 20, 37)
    states[...] = np.nan
    line = np.array([-1, *range(9)]), np.array([-1] * 9 + [0])
    whole = delta_rule(x, gates, decay, bias, states, 2, *line)
    for t in range(10):
        places = np.array([-1 if not t else -2 - (1 + t % 2)]), np.array([1 + (t + 1) % 2])
        np.testing.assert_array_equal(
            delta_rule(x[t : t + 1], gates[t : t + 1], decay, bias, states, 2, *places)[0], whole[t]
        )
    np.testing.assert_array_equal(states[1 + 10 % 2], states[0])


@pytest.mark.parametrize("logit", [-200.0, 200.0])
def test_the_largest_gates_forget_or_keep_all(logit: float) -> None:
    x, gates, decay, bias, states = drawn(10, 2, 4, 20, 37)
    gates[...], reference_states = logit, states.copy()
    given = x, gates, decay, bias, reference_states, BEFORE, AFTER
    with np.errstate(over="ignore"):
        expected = reference.delta_rule(*given, np, np.empty((10, 4 * 37), np.float32), key_heads=2)
    ours = delta_rule(x, gates, decay, bias, states, 2)
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-6 * max(1, np.abs(expected).max()))
