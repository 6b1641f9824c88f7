"""The gate of a gated MLP against its formula."""

import numpy as np
import pytest

from minillm.reference.activation import ACTIVATIONS, FLOPS_PER_ELEMENT
from minillm.reference.glu import cost, glu


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_first_half_is_activated_and_multiplies_the_second(activation: str) -> None:
    x = np.random.default_rng(0).standard_normal((4, 10))
    before, out = x.copy(), np.full((4, 5), np.nan)
    assert glu(x, activation, np, out) is out
    np.testing.assert_allclose(out, ACTIVATIONS[activation](x[:, :5].copy(), np) * x[:, 5:], rtol=1e-12)
    np.testing.assert_array_equal(x, before)


def test_swiglu_worked_out_by_hand() -> None:
    out = glu(np.array([[0.0, 2.0, 5.0, -3.0]]), "silu", np, np.empty((1, 2)))
    np.testing.assert_allclose(out, [[0.0, 2 / (1 + np.exp(-2)) * -3]])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_cost(activation: str) -> None:
    x, out = np.zeros((4, 10), np.float32), np.zeros((4, 5), np.float32)
    assert cost(4, 5, activation) == (20 * (FLOPS_PER_ELEMENT[activation] + 1), x.nbytes, out.nbytes, 2 * out.nbytes)
