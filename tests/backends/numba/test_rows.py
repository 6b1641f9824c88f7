"""Kernels that treat each row on its own, against float64 and against the reference operations."""

import math

import numpy as np
import pytest

pytest.importorskip("numba", reason="these kernels are compiled by Numba")

from minillm import ops
from minillm.backends.numba.rows import ACTIVATION_CODES, THREADED, embed, finish, layer_norm
from minillm.backends.weights import expand, narrow
from minillm.ops.activation import ACTIVATIONS
from minillm.ops.quantize import quantize

RNG = np.random.default_rng


def assert_as_good(ours: np.ndarray, plain: np.ndarray, expected: np.ndarray) -> None:
    """The largest error is at most twice the reference's."""
    error, plain_error = np.abs(ours - expected).max(initial=0), np.abs(plain - expected).max(initial=0)
    assert error <= 2 * plain_error, f"error {error:.1e}, the plain one's is {plain_error:.1e}"


def plain_norm(x: np.ndarray, gain: np.ndarray | None, bias: np.ndarray | None) -> np.ndarray:
    return ops.layer_norm(x, gain, bias, 1e-5, np, np.empty_like(x))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("T", "E"), [(1, 768), (7, 33), (40, 1030), (3, 1), (0, 16)])
def test_layer_norm(T: int, E: int, affine: bool) -> None:
    rng = RNG(0)
    x = (rng.standard_normal((T, E)) * 3 + 50 * rng.standard_normal((T, 1))).astype(np.float32)
    gain, bias = rng.standard_normal((2, E)).astype(np.float32) if affine else (None, None)
    ours = layer_norm(x, gain, bias, 1e-5, np.full_like(x, np.nan))
    wide = [None if part is None else part.astype(np.float64) for part in (x, gain, bias)]
    assert_as_good(ours, plain_norm(x, gain, bias), plain_norm(*wide))


def test_layer_norm_takes_parameters_as_they_are_mapped() -> None:
    memory = np.frombuffer(b"\0" + RNG(0).standard_normal(8).astype(np.float32).tobytes(), np.uint8)[1:]
    gain = memory.view(np.float32)  # read-only, at an odd address
    x = RNG(1).standard_normal((2, 8)).astype(np.float32)
    ours = layer_norm(x, gain, None, 1e-5, np.empty_like(x))
    np.testing.assert_allclose(ours, plain_norm(x, gain, None), rtol=1e-5, atol=1e-6)


def test_a_row_of_a_norm_is_the_same_alone() -> None:
    x = RNG(0).standard_normal((9, 100)).astype(np.float32)
    together = layer_norm(x, None, None, 1e-5, np.empty_like(x))
    for i in range(9):
        alone = layer_norm(x[i : i + 1], None, None, 1e-5, np.empty((1, 100), np.float32))
        np.testing.assert_array_equal(alone[0], together[i])


@pytest.mark.parametrize("activation", ACTIVATION_CODES)
@pytest.mark.parametrize(("T", "F"), [(1, 100), (5, 3), (0, 8), (THREADED // 1000 + 1, 1001)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_what_follows_a_product(activation: str | None, T: int, F: int, biased: bool, residual: bool) -> None:
    rng = RNG(0)
    y = (rng.standard_normal((T, F)) * 4).astype(np.float32)
    bias = rng.standard_normal(F).astype(np.float32) if biased else None
    before = rng.standard_normal((T, F)).astype(np.float32) if residual else None

    def reference(dtype: type) -> np.ndarray:
        result = y.astype(dtype)
        if bias is not None:
            result += bias
        if activation == "gelu" and dtype is np.float64:
            result *= (np.vectorize(math.erf, otypes=[float])(result / np.sqrt(2)) + 1) / 2
        elif activation is not None:
            ACTIVATIONS[activation](result, np)
        return result if before is None else result + before

    kept = None if before is None else before.copy()
    ours = finish(y.copy(), bias, activation, before)
    assert_as_good(ours, reference(np.float32), reference(np.float64))
    if before is not None:
        np.testing.assert_array_equal(before, kept)


@pytest.mark.parametrize("activation", ACTIVATION_CODES)
def test_what_is_not_finite_stays(activation: str | None) -> None:
    y = np.array([[np.nan, np.inf, 1.0]], np.float32)
    finish(y, None, activation, None)
    assert np.isnan(y[0, 0]) and y[0, 1] == np.inf and np.isfinite(y[0, 2])
    x = np.array([[1.0, np.nan, 2.0], [1.0, np.inf, 2.0], [1.0, 0.0, 2.0]], np.float32)
    normed = layer_norm(x, None, None, 1e-5, np.empty_like(x))
    assert not np.isfinite(normed[:2]).any() and np.isfinite(normed[2]).all()


def table(form: str, V: int, E: int, seed: int) -> object:
    x = RNG(seed).standard_normal((V, E)).astype(np.float32)
    if form == "float32":
        return x
    if form in ("float16", "bfloat16"):
        return narrow(x, form)
    bits, group = form.split("x")
    return quantize(x, int(bits), int(group))


@pytest.mark.parametrize("form", ["float32", "float16", "bfloat16", "8x32", "8x64", "4x32", "4x64"])
@pytest.mark.parametrize("E", [64, 100, 7])
def test_embeddings_are_looked_up_in_every_format(form: str, E: int) -> None:
    tokens, places = table(form, 11, E, 0), table("float32", 5, E, 1)
    ids, positions = np.array([3, 10, 0, 3]), np.array([4, 0, 1, 1])
    out = np.full((4, E), np.nan, np.float32)
    np.testing.assert_array_equal(embed(ids, tokens, out), expand(tokens, ids))
    both = embed(ids, tokens, np.full_like(out, np.nan), positions, places)
    np.testing.assert_allclose(both, expand(tokens, ids) + places[positions], rtol=1e-6, atol=1e-6)
    assert embed(ids[:0], tokens, out[:0]).shape == (0, E)


def test_a_table_may_be_read_only() -> None:
    tokens = table("float32", 4, 8, 0)
    tokens.flags.writeable = False
    np.testing.assert_array_equal(embed(np.array([2]), tokens, np.empty((1, 8), np.float32))[0], tokens[2])
