"""Layer norm and RMS norm against their formulas in float64."""

import numpy as np
import pytest

from minillm.reference import norm


def formula(x: np.ndarray, gain, bias, epsilon: float) -> np.ndarray:
    x = x.astype(np.float64)
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * gain + bias


@pytest.mark.parametrize("shift", [0.0, 30.0])
@pytest.mark.parametrize("T", [1, 7])
def test_layer_norm_is_its_formula(T: int, shift: float) -> None:
    rng = np.random.default_rng(T)
    x = (rng.standard_normal((T, 48)) * 3 + shift).astype(np.float32)
    gain, bias = rng.standard_normal((2, 48)).astype(np.float32)
    before, out = x.copy(), np.empty_like(x)
    assert norm.layer_norm(x, gain, bias, 1e-5, np, out) is out
    np.testing.assert_allclose(out, formula(x, gain, bias, 1e-5), rtol=1e-5, atol=2e-5)
    np.testing.assert_array_equal(x, before)


def test_without_gain_and_bias_rows_have_mean_0_and_variance_1() -> None:
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32) * 9
    y = norm.layer_norm(x, None, None, 0.0, np, np.empty_like(x))
    np.testing.assert_allclose(y.mean(axis=-1), 0, atol=1e-6)
    np.testing.assert_allclose(y.var(axis=-1), 1, rtol=1e-5)


def test_epsilon_keeps_a_constant_row_finite() -> None:
    x = np.full((1, 8), 5.0, np.float32)
    assert norm.layer_norm(x, None, None, 1e-5, np, np.empty_like(x)).tolist() == [[0.0] * 8]


def test_epsilon_stands_beside_the_variance() -> None:
    x = np.array([[-1.0, 1.0]], np.float32)
    y = norm.layer_norm(x, None, None, 3.0, np, np.empty_like(x))
    np.testing.assert_allclose(y, [[-0.5, 0.5]])


@pytest.mark.parametrize("affine", [True, False])
def test_cost_is_a_count_of_the_operations(affine: bool) -> None:
    T, E, flops = 3, 8, 0
    for _ in range(T):
        flops += E + E + 2 * E + E  # sum for the mean, differences, squares and their sum, scaling
        flops += 2 * E if affine else 0
        flops += 2 + 1 + 2  # two divisions by E, epsilon, square root and reciprocal
    x = np.zeros((T, E), np.float32)
    cost = norm.layer_norm_cost(T, E, gain=affine, bias=affine)
    assert cost == (flops, x.nbytes + (2 * x[0].nbytes if affine else 0), x.nbytes, 0)


def rms_formula(x: np.ndarray, gain: np.ndarray, epsilon: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * gain


@pytest.mark.parametrize("shift", [0.0, 30.0])
@pytest.mark.parametrize("T", [0, 1, 7])
def test_rms_norm_is_its_formula(T: int, shift: float) -> None:
    rng = np.random.default_rng(T)
    x = (rng.standard_normal((T, 48)) * 3 + shift).astype(np.float32)
    gain = rng.standard_normal(48).astype(np.float32)
    before, out = x.copy(), np.empty_like(x)
    assert norm.rms_norm(x, gain, 1e-6, np, out) is out
    np.testing.assert_allclose(out, rms_formula(x, gain, 1e-6), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(x, before)


def test_rms_norm_of_heads_is_that_of_each_head_alone() -> None:
    rows, gain = (
        np.random.default_rng(1).standard_normal((3, 2, 5, 8)).astype(np.float32)[0],
        np.full(8, 1.5, np.float32),
    )
    out = norm.rms_norm(rows, gain, 1e-5, np, np.empty_like(rows))
    for token, heads in enumerate(rows):
        alone = norm.rms_norm(heads, gain, 1e-5, np, np.empty_like(heads))
        np.testing.assert_allclose(out[token], alone, rtol=1e-6)


def test_without_gain_rows_have_mean_square_1_and_keep_their_direction() -> None:
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32) * 9 + 4
    y = norm.rms_norm(x, None, 0.0, np, np.empty_like(x))
    np.testing.assert_allclose((y**2).mean(axis=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(y / x, (y / x)[:, :1].repeat(64, axis=1), rtol=1e-6)


def test_epsilon_stands_beside_the_mean_square() -> None:
    y = norm.rms_norm(np.array([[-1.0, 1.0]], np.float32), None, 3.0, np, np.empty((1, 2), np.float32))
    np.testing.assert_allclose(y, [[-0.5, 0.5]])


@pytest.mark.parametrize("affine", [True, False])
def test_cost_of_rms_norm_is_a_count_of_the_operations(affine: bool) -> None:
    T, E, flops = 3, 8, 0
    for _ in range(T):
        flops += 2 * E + E + (E if affine else 0)  # squares and their sum, scaling, gain
        flops += 1 + 1 + 2  # division by E, epsilon, square root and reciprocal
    x = np.zeros((T, E), np.float32)
    cost = norm.rms_norm_cost(T, E, affine=affine)
    assert cost == (flops, x.nbytes + (x[0].nbytes if affine else 0), x.nbytes, 0)


@pytest.mark.reference
def test_rms_norm_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    x, gain = np.random.default_rng(3).standard_normal((2, 5, 64)).astype(np.float32)
    expected = torch.nn.functional.rms_norm(torch.from_numpy(x), (64,), torch.from_numpy(gain[0]), 1e-6).numpy()
    np.testing.assert_allclose(norm.rms_norm(x, gain[0], 1e-6, np, np.empty_like(x)), expected, rtol=1e-5, atol=1e-6)
