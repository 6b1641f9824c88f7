"""Kernels that treat each row on its own, against float64 and against the reference operations."""

import math

import numpy as np
import pytest

pytest.importorskip("numba", reason="these kernels are compiled by Numba")

from minillm import reference
from minillm.backends.formats import FORMATS
from minillm.backends.numba.activations import ACTIVATION_CODES
from minillm.backends.numba.rows import THREADED, embed, finish, glu, layer_norm, rms_norm
from minillm.backends.weights import expand, narrow
from minillm.reference.activation import ACTIVATIONS
from minillm.reference.quantize import quantize

RNG = np.random.default_rng


def assert_as_good(ours: np.ndarray, plain: np.ndarray, expected: np.ndarray, roundings: float = 8) -> None:
    """The largest error is at most twice the reference's, or what so many roundings to float32 can give.

    Of few numbers the reference's largest error may be small by chance, and compilers order sums as the CPU likes it.
    """
    error, plain_error = np.abs(ours - expected).max(initial=0), np.abs(plain - expected).max(initial=0)
    bound = max(2 * plain_error, roundings * 2.0**-24 * np.abs(expected).max(initial=0))
    assert error <= bound, f"error {error:.1e}, at most {bound:.1e} expected, the plain one's is {plain_error:.1e}"


def roundings_of_norm(E: int) -> float:
    """Half those of a sum of E squares, since a root follows; and those of what is done to the sum and with it.

    A sum of n numbers in any order is off by n u of their magnitudes at worst, and by 4 sqrt(n) u next to never (Higham
    and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019).
    """
    return min(E, 4 * math.sqrt(E)) / 2 + 8


def plain_norm(x: np.ndarray, gain: np.ndarray | None, bias: np.ndarray | None) -> np.ndarray:
    return reference.layer_norm(x, gain, bias, 1e-5, np, np.empty_like(x))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("T", "E"), [(1, 768), (7, 33), (40, 1030), (3, 1), (0, 16)])
def test_layer_norm(T: int, E: int, affine: bool) -> None:
    rng = RNG(0)
    x = (rng.standard_normal((T, E)) * 3 + 50 * rng.standard_normal((T, 1))).astype(np.float32)
    gain, bias = rng.standard_normal((2, E)).astype(np.float32) if affine else (None, None)
    ours = layer_norm(x, gain, bias, 1e-5, np.full_like(x, np.nan))
    wide = [None if part is None else part.astype(np.float64) for part in (x, gain, bias)]
    assert_as_good(ours, plain_norm(x, gain, bias), plain_norm(*wide), roundings_of_norm(E))


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


def plain_rms_norm(x: np.ndarray, gain: np.ndarray | None) -> np.ndarray:
    return reference.rms_norm(x, gain, 1e-5, np, np.empty_like(x))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("T", "E"), [(1, 768), (7, 33), (THREADED // 1000, 1030), (3, 1), (0, 16)])
def test_rms_norm(T: int, E: int, affine: bool) -> None:
    rng = RNG(0)
    x = (rng.standard_normal((T, E)) * 10.0 ** rng.integers(-3, 3, (T, 1))).astype(np.float32)
    gain = rng.standard_normal(E).astype(np.float32) if affine else None
    ours = rms_norm(x, gain, 1e-5, np.full_like(x, np.nan))
    exact = plain_rms_norm(x.astype(np.float64), None if gain is None else gain.astype(np.float64))
    assert_as_good(ours, plain_rms_norm(x, gain), exact, roundings_of_norm(E))


@pytest.mark.parametrize(("T", "heads", "D"), [(1, 9, 64), (5, 3, 7), (THREADED // 100, 4, 32)])
def test_rms_norm_of_heads_whose_rows_lie_apart(T: int, heads: int, D: int) -> None:
    rng = RNG(0)
    x = rng.standard_normal((T, (heads + 4) * D)).astype(np.float32)[:, D : (heads + 1) * D].reshape(T, heads, D)
    gain, kept = rng.standard_normal(D).astype(np.float32), x.copy()
    ours = rms_norm(x, gain, 1e-5, np.full(x.shape, np.nan, np.float32))
    exact = plain_rms_norm(x.astype(np.float64), gain.astype(np.float64))
    assert_as_good(ours, plain_rms_norm(x, gain), exact, roundings_of_norm(D))
    np.testing.assert_array_equal(x, kept)
    for h in range(heads):  # each head by itself
        alone = rms_norm(np.ascontiguousarray(x[:, h]), gain, 1e-5, np.empty((T, D), np.float32))
        np.testing.assert_array_equal(alone, ours[:, h])


@pytest.mark.parametrize("activation", ["silu", "gelu_new", "gelu", "relu"])
@pytest.mark.parametrize(("T", "F"), [(1, 1536), (5, 3), (0, 8), (THREADED // 1000 + 1, 1001)])
def test_gates(T: int, F: int, activation: str) -> None:
    x = (RNG(0).standard_normal((T, 2 * F)) * 4).astype(np.float32)
    kept = x.copy()
    ours = glu(x, activation, np.full((T, F), np.nan, np.float32))
    plain, exact = (
        reference.glu(x.astype(dtype), activation, np, np.empty((T, F), dtype)) for dtype in (np.float32, np.float64)
    )
    if activation == "gelu":
        exact = exact_gelu(x[:, :F].astype(np.float64)) * x[:, F:]
    assert_as_good(ours, plain, exact)
    np.testing.assert_array_equal(x, kept)


def exact_gelu(x: np.ndarray) -> np.ndarray:
    """The reference has an erf of 1e-7 in float64 too."""
    return x * (np.vectorize(math.erf, otypes=[float])(x / np.sqrt(2)) + 1) / 2


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
            result = exact_gelu(result)
        elif activation is not None:
            ACTIVATIONS[activation](result, np)
        return result if before is None else result + before

    kept = None if before is None else before.copy()
    ours = finish(y.copy(), bias, activation, before)
    assert_as_good(ours, reference(np.float32), reference(np.float64))
    if before is not None:
        np.testing.assert_array_equal(before, kept)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "silu"])
def test_activations_are_exact_where_numbers_are_large_or_small(activation: str) -> None:
    """To 1e-6, also where squares and exponentials overflow on the way."""
    x = np.concatenate([np.linspace(-120, 120, 4001), 10.0 ** np.arange(-30, 38, 2), -(10.0 ** np.arange(-30, 38, 2))])
    y = finish(x.astype(np.float32)[None], None, activation, None)[0]
    wide = x.astype(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        exact = exact_gelu(wide) if activation == "gelu" else ACTIVATIONS[activation](wide.copy(), np)
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("F", [3, 64])  # one by one, and by vectors
@pytest.mark.parametrize("activation", ACTIVATION_CODES)
def test_what_is_not_finite_stays(activation: str | None, F: int) -> None:
    y = np.ones((1, F), np.float32)
    y[0, :2] = np.nan, np.inf
    finish(y, None, activation, None)
    assert np.isnan(y[0, 0]) and y[0, 1] == np.inf and np.isfinite(y[0, 2:]).all()


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_norm_of_what_is_not_finite_is_not(norm: str) -> None:
    x = np.array([[1.0, np.nan, 2.0], [1.0, np.inf, 2.0], [1.0, 0.0, 2.0]], np.float32)
    out = np.empty_like(x)
    normed = layer_norm(x, None, None, 1e-5, out) if norm == "layer" else rms_norm(x, None, 1e-5, out)
    assert np.isnan(normed[:2]).any(axis=1).all() and np.isfinite(normed[2]).all()


def test_every_activation_of_the_reference_has_its_code() -> None:
    assert ACTIVATION_CODES.keys() == {None, *ACTIVATIONS}
    assert len(set(ACTIVATION_CODES.values())) == len(ACTIVATION_CODES)


def table(form: str, V: int, E: int, seed: int) -> object:
    x = RNG(seed).standard_normal((V, E)).astype(np.float32)
    if form == "float32":
        return x
    if form in ("float16", "bfloat16"):
        return narrow(x, FORMATS[form])
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
