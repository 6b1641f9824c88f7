"""Activations against their definitions with math.erf, math.tanh and math.exp; the gate against its formula."""

import math

import numpy as np
import pytest

from minillm.reference.activation import (
    ACTIVATIONS,
    ALIASES,
    FLOPS_PER_ELEMENT,
    erf,
    gelu,
    gelu_new,
    relu,
    relu2,
    silu,
)
from minillm.reference.gates import GATES, gate, glu, glu_cost, multiply, scale_logits

X = np.concatenate([np.linspace(-9, 9, 3001), [0.0, -0.0, 1e-20, -1e-20, 50.0, -50.0]]).astype(np.float32)


def test_erf_is_within_its_stated_error() -> None:
    exact = np.array([math.erf(x) for x in X.astype(np.float64)])
    assert np.abs(erf(X.astype(np.float64), np) - exact).max() <= 1.5e-7
    assert np.abs(erf(X, np) - exact).max() <= 4e-7  # and float32's rounding
    np.testing.assert_array_equal(erf(-X, np), -erf(X, np))


def test_gelu_is_x_times_the_normal_distribution_below_x() -> None:
    exact = np.array([x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in X.astype(np.float64)])
    assert np.abs(gelu(X.copy(), np) - exact).max() <= 2e-6


def test_gelu_is_not_the_tanh_approximation() -> None:
    x = np.array([2.0], np.float32)
    exact = 2 * 0.5 * (1 + math.erf(math.sqrt(2)))
    tanh = 2 * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (2 + 0.044715 * 8)))
    assert abs(float(gelu(x, np)[0]) - exact) < 2e-6 < 5e-5 < abs(tanh - exact)


def test_gelu_new_is_the_tanh_approximation() -> None:
    exact = [x * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) for x in X.astype(np.float64)]
    assert np.abs(gelu_new(X.copy(), np) - exact).max() <= 2e-6
    assert np.abs(gelu_new(X.astype(np.float64), np) - exact).max() <= 1e-14


def test_silu_is_x_times_the_logistic_function() -> None:
    exact = np.array([x / (1 + math.exp(-x)) for x in X.astype(np.float64)])
    assert np.abs(silu(X.copy(), np) - exact).max() <= 1e-6
    with np.errstate(over="ignore"):
        assert silu(np.array([-1000.0, 1000.0], np.float32), np).tolist() == [0.0, 1000.0]


def test_other_names_stand_for_activations_that_there_are() -> None:
    assert set(ALIASES.values()) <= set(ACTIVATIONS)
    assert not set(ALIASES) & set(ACTIVATIONS)


def test_the_square_of_relu() -> None:
    assert relu2(np.array([[-1.5, 0.0, 2.5]], np.float32), np).tolist() == [[0.0, 0.0, 6.25]]


def test_relu() -> None:
    assert relu(np.array([[-1.5, 0.0, 2.5]], np.float32), np).tolist() == [[0.0, 0.0, 2.5]]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_work_in_place_and_have_a_cost(name: str) -> None:
    x = X.copy()
    assert ACTIVATIONS[name](x, np) is x
    assert FLOPS_PER_ELEMENT[name] >= 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_first_half_is_activated_and_multiplies_the_second(activation: str) -> None:
    x = np.random.default_rng(0).standard_normal((4, 10))
    before, out = x.copy(), np.full((4, 5), np.nan)
    assert glu(x, activation, np, out) is out
    np.testing.assert_allclose(out, ACTIVATIONS[activation](x[:, :5].copy(), np) * x[:, 5:], rtol=1e-12)
    np.testing.assert_array_equal(x, before)


def test_relu_gates_a_row_by_itself_to_its_square() -> None:
    x = np.array([[-1.5, 0.0, 2.5]])
    assert glu(x, "relu", np, np.empty((1, 3))).tolist() == [[0.0, 0.0, 6.25]]


def test_the_clamped_gate_of_gpt_oss_is_its_formula() -> None:
    x = np.array([[9.0, -9.0, 0.5, 1.0, 9.0, -9.0]])
    g, u = np.array([7.0, -9.0, 0.5]), np.array([1.0, 7.0, -7.0])
    out = glu(x, "swiglu_oai", np, np.empty((1, 3)))
    np.testing.assert_allclose(out[0], g / (1 + np.exp(-1.702 * g)) * (u + 1), rtol=1e-12)


def test_swiglu_worked_out_by_hand() -> None:
    out = glu(np.array([[0.0, 2.0, 5.0, -3.0]]), "silu", np, np.empty((1, 2)))
    np.testing.assert_allclose(out, [[0.0, 2 / (1 + np.exp(-2)) * -3]])


@pytest.mark.parametrize("activation", GATES)
def test_cost_of_a_gate(activation: str) -> None:
    x, out = np.zeros((4, 10), np.float32), np.zeros((4, 5), np.float32)
    assert glu_cost(4, 5, activation) == (
        20 * (FLOPS_PER_ELEMENT[activation] + 1),
        x.nbytes,
        out.nbytes,
        2 * out.nbytes,
    )


def test_logits_are_scaled_and_capped_in_place() -> None:
    logits = np.array([[0.0, 1.0, -8.0, 1e6]], np.float32)
    assert scale_logits(logits, 0.5, 3.0, np) is logits
    np.testing.assert_allclose(logits, [[0, 3 * math.tanh(1 / 6), 3 * math.tanh(-4 / 3), 3]], rtol=1e-6)
    np.testing.assert_array_equal(scale_logits(np.ones((1, 2)), 0.25, None, np), [[0.25, 0.25]])


def test_a_gate_of_silu_is_the_product_of_both_factors() -> None:
    x, logits = np.random.default_rng(0).standard_normal((2, 3, 4))
    expected = [
        [a * z / (1 + math.exp(-z)) for a, z in zip(*rows, strict=True)] for rows in zip(x, logits, strict=True)
    ]
    np.testing.assert_allclose(gate(x, logits, np, np.empty((3, 4)), silu=True), expected, rtol=1e-14)


def test_rows_are_multiplied_by_others_and_by_a_number() -> None:
    x, others, out = np.array([[1.0, 2.0, 3.0]]), np.array([[4.0, 5.0, 6.0]]), np.empty((1, 3))
    assert multiply(x, others, None, np, out) is out
    assert out.tolist() == [[4, 10, 18]]
    assert multiply(x, None, np.array([0.5]), np, out).tolist() == [[0.5, 1, 1.5]]
    assert multiply(x, others, np.array([0.5]), np, out).tolist() == [[2, 5, 9]]
    assert x.tolist() == [[1, 2, 3]]
