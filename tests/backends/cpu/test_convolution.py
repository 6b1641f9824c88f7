"""The convolution kernel against the reference: odd widths, many taps, texts that begin, go on and branch."""

from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cpu import launching

from .kernels import ACTIVATIONS, fill, run

BEFORE = np.array([-1, 0, 1, -2 - 4, 3, 4, -2, 6, 6, 7])
"""A text that begins, one that goes on from slot 4, and one from slot 0 that branches"""
AFTER = np.array([-1, 3, 1, -1, -1, 6, -1, 5, -1, -1])


def convolve(x: Any, taps: Any, bias: Any, states: Any, *, shares: int = 1, **variant: Any) -> np.ndarray:
    (k, C), T = taps.shape, len(x)
    out = np.full((T, C), np.nan, np.float32)
    arguments = fill(
        launching.Convolve, x=x, taps=taps, bias=bias, states=states, before=BEFORE, after=AFTER, out=out, T=T, C=C,
        k=k, gated=variant["gated"], activation=ACTIVATIONS[variant["activation"]], stride=x.strides[0] // 4,
    )  # fmt: skip
    run("convolve", arguments, shares)
    return out


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("k", "C"), [(2, 1), (3, 64), (4, 37), (64, 20)])
def test_results_and_states_are_the_references(k: int, C: int, activation: str | None, gated: bool) -> None:
    rng, variant = np.random.default_rng(k), {"gated": gated, "activation": activation}
    width = 3 * C if gated else C
    shapes = (10, width + 3), (k, C), (7, k - 1, C)
    x, taps, states = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    x = x[:, :width]  # of wider rows
    bias = rng.standard_normal(C).astype(np.float32) if activation else None
    plain_states, kept = states.copy(), states.copy()
    expected = reference.convolve(
        x, taps, bias, plain_states, BEFORE, AFTER, np, np.empty((10, C), np.float32), **variant
    )
    ours = convolve(x, taps, bias, states, **variant)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-7 * k * max(1, np.abs(expected).max()))
    np.testing.assert_array_equal(states, plain_states)
    np.testing.assert_array_equal(convolve(x, taps, bias, kept, shares=4, **variant), ours)


def test_a_token_has_the_same_bits_after_a_state_and_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, C = np.random.default_rng(0), 37
    x, taps = (rng.standard_normal(shape).astype(np.float32) for shape in ((10, 3 * C), (4, C)))
    states = np.full((4, 3, C), np.nan, np.float32)
    line = np.array([-1, *range(9)]), np.array([-1] * 9 + [0])
    for name, values in zip(("BEFORE", "AFTER"), line, strict=True):
        monkeypatch.setitem(globals(), name, values)
    whole = convolve(x, taps, None, states, gated=True, activation=None)
    for t in range(10):
        monkeypatch.setitem(globals(), "BEFORE", np.array([-1 if not t else -2 - (1 + t % 2)]))
        monkeypatch.setitem(globals(), "AFTER", np.array([1 + (t + 1) % 2]))
        one = convolve(x[t : t + 1], taps, None, states, gated=True, activation=None)
        np.testing.assert_array_equal(one[0], whole[t])
    np.testing.assert_array_equal(states[1 + 10 % 2], states[0])
