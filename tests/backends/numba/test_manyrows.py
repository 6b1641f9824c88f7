"""Products of many rows, in every format and on every path, against the same product in float64."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba", reason="the fast CPU kernels need numba")

from minillm import reference
from minillm.backends.numba import manyrows, workspace
from minillm.backends.numba.activations import ACTIVATION_CODES
from minillm.backends.numba.compiling import num_threads, set_threads
from minillm.backends.numba.manyrows import linear_many
from minillm.reference.quantize import Quantized, dequantize, quantize

FLOATS = ["float32", "float16", "bfloat16"]
INTEGERS = [(bits, group) for bits in (8, 4) for group in (32, 64)]
SHAPES = [(17, 40, 7), (50, 100, 130), (129, 300, 97), (96, 864, 112), (600, 64, 16)]
"""T, in, out: tails of rows, inputs and outputs; more than one piece of inputs; more rows than one pass takes"""

tiles = pytest.mark.skipif(not manyrows.avx512.HAS_FLOAT_TILES, reason="this CPU has neither AVX-512 nor AVX2")
vnni = pytest.mark.skipif(not manyrows.avx512.HAS_INTEGER_TILES, reason="this CPU has no AVX-512 VNNI")


@pytest.fixture(params=["as found", "blas"])
def path(request, monkeypatch):
    """Run a test with what this CPU has, and as on a CPU without vectors that our tiles know."""
    if request.param == "blas":
        monkeypatch.setattr(manyrows.avx512, "HAS_FLOAT_TILES", False)
    return request.param


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def store(weight, dtype):
    """A matrix in a format of floats, as it is stored, and what that stands for."""
    if dtype == "bfloat16":
        stored = weight.astype(ml_dtypes.bfloat16)
        return stored.view(np.uint16), stored.astype(np.float32)
    stored = weight.astype(dtype)
    return stored, stored.astype(np.float32)


def product(x, weight, bias=None, **options):
    """`linear_many` into an array of NaN."""
    out = np.full((len(x), weight.shape[0]), np.nan, np.float32)
    assert linear_many(x, weight, bias, out, **options) is out
    return out


def rms(x):
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def exact(x, weight):
    return x.astype(np.float64) @ weight.astype(np.float64).T  # [T, in] x [in, out] -> [T, out]


def rounded_groups(x):
    """Activations as int8 in groups of 32 stands for them: largest magnitude / 127 is the scale. [T, in] -> [T, in]"""
    padded = np.zeros((len(x), -(-x.shape[1] // 32) * 32))
    padded[:, : x.shape[1]] = x
    groups = padded.reshape(len(x), -1, 32)  # [T, in'] -> [T, in' / 32, 32]
    scales = np.abs(groups).max(axis=-1, keepdims=True) / 127
    return (np.rint(groups / np.where(scales, scales, 1)) * scales).reshape(len(x), -1)[:, : x.shape[1]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_multiplied_as_exactly_as_float32(path, dtype, shape):
    rows, inputs, outputs = shape
    x, (stored, weight) = random(rows, inputs), store(random(outputs, inputs, seed=1), dtype)
    error = rms(product(x, stored) - exact(x, weight))
    assert error <= 2 * rms(x @ weight.T - exact(x, weight))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "group"), INTEGERS)
def test_integers_without_vnni_are_multiplied_as_exactly_as_float32(path, monkeypatch, bits, group, shape):
    monkeypatch.setattr(manyrows.avx512, "HAS_INTEGER_TILES", False)
    rows, inputs, outputs = shape
    x, stored = random(rows, inputs), quantize(random(outputs, inputs, seed=1), bits, group)
    weight = dequantize(stored)
    error = rms(product(x, stored) - exact(x, weight))
    assert error <= 2 * rms(x @ weight.T - exact(x, weight))


@vnni
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "group"), INTEGERS)
def test_vnni_multiplies_exactly_what_the_activations_are_rounded_to(bits, group, shape):
    rows, inputs, outputs = shape
    x, stored = random(rows, inputs), quantize(random(outputs, inputs, seed=1), bits, group)
    x[0, :32], x[1] = 0, 1e-35  # groups of zeros, and of numbers too small for a scale
    weight = dequantize(stored)
    y = product(x, stored)
    # An activation that lies halfway between two integers in float64 may go to the other one in float32.
    halfway = np.abs(weight).max() * np.abs(x).max() / 127
    different = np.abs(y - exact(rounded_groups(x), weight)) > 1e-4
    assert different.mean() < 0.01
    np.testing.assert_allclose(y, exact(rounded_groups(x), weight), rtol=0, atol=3 * halfway)
    np.testing.assert_allclose(y[1], 0, atol=1e-30)


@vnni
@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_activations_costs_no_more_than_in_llama_cpp(bits):
    """Q8_0: groups of 32 with a float16 scale, for activations too; weights in Q4_0 lose far more."""
    x, original = random(64, 768), random(80, 768, seed=1)
    stored = quantize(original, bits)
    q = quantize(x, 8)
    theirs = exact(dequantize(q), dequantize(stored)) - exact(x, original)
    ours = product(x, stored) - exact(x, original)
    assert rms(ours) <= 1.01 * rms(theirs)
    largest = rms(exact(x, original))
    assert rms(ours) < (0.01 if bits == 8 else 0.12) * largest


@pytest.mark.parametrize("activation", ACTIVATION_CODES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
def test_bias_activation_and_residual_are_those_of_the_reference(path, activation, with_bias, with_residual):
    x, weight = random(37, 48), random(41, 48, seed=1)
    bias = random(41, seed=2) if with_bias else None
    residual = random(37, 41, seed=3) if with_residual else None
    before = None if residual is None else residual.copy()
    y = product(x, weight, bias=bias, activation=activation, residual=residual)
    expected = reference.linear(x, weight, bias, np, np.empty_like(y), activation=activation, residual=residual)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    if residual is not None:
        np.testing.assert_array_equal(residual, before)


@vnni
@pytest.mark.parametrize("activation", [None, "relu"])
def test_integers_take_the_same_bias_activation_and_residual(activation):
    x, stored, bias, residual = random(37, 64), quantize(random(41, 64, seed=1), 8), random(41), random(37, 41)
    plain = product(x, stored) + bias
    y = product(
        x, stored, bias=bias, activation=activation, residual=residual
    )  # fmt: skip
    np.testing.assert_allclose(y, (np.maximum(plain, 0) if activation else plain) + residual, rtol=1e-6, atol=1e-6)


def all_formats(weight):
    return [
        *(store(weight, dtype)[0] for dtype in FLOATS),
        *(quantize(weight, bits) for bits in (8, 4)),
    ]


@tiles
def test_a_row_has_the_same_bits_whatever_stands_beside_it():
    x, weight = random(1100, 320), random(50, 320, seed=1)
    for stored in all_formats(weight):
        together = product(x, stored)
        for rows in (slice(0, 1), slice(3, 20), slice(40, 100), slice(0, 600)):
            np.testing.assert_array_equal(product(x[rows], stored), together[rows])


@tiles
def test_the_number_of_threads_changes_no_bit():
    x, weight = random(60, 320), random(250, 320, seed=1)
    threads = num_threads()
    for stored in all_formats(weight):
        usual = product(x, stored)
        try:
            set_threads(1)
            np.testing.assert_array_equal(product(x, stored), usual)
        finally:
            set_threads(threads)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's product says so
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_hidden_and_stays_in_its_row(path, value):
    x, weight = random(40, 96), random(33, 96, seed=1)
    x[5, 70] = value
    for stored in all_formats(weight):
        y = product(x, stored)
        assert not np.isfinite(y[5]).any()
        assert np.isfinite(np.delete(y, 5, axis=0)).all()
        if np.isnan(value):
            assert np.isnan(product(x, stored, activation="relu")[5]).all()


@vnni
@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinity_that_is_rounded_shows_behind_relu(value):
    x, weight = random(40, 96), random(33, 96, seed=1)
    x[5, 70] = value
    for bits, group in INTEGERS:
        y = product(x, quantize(weight, bits, group), activation="relu")
        assert np.isnan(y[5]).all()
        assert np.isfinite(np.delete(y, 5, axis=0)).all()


@vnni
@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize(("bits", "group"), INTEGERS)
def test_sums_of_the_largest_integers_are_exact(bits, group, side):
    """127 or -127 by -127 or -8 everywhere: nothing saturates or wraps."""
    values = np.full((20, 256), -127, np.int8) if bits == 8 else np.zeros((20, 128), np.uint8)  # 0 stands for -8
    stored = Quantized(values, np.ones((20, 256 // group), np.float16), 256)
    y = product(np.full((18, 256), side * 127, np.float32), stored)
    np.testing.assert_array_equal(y, side * 127 * 256 * (-127 if bits == 8 else -8))


def test_no_rows_give_no_rows(path):
    for stored in all_formats(random(33, 96)):
        assert product(random(0, 96), stored).shape == (0, 33)


def test_mapped_weights_are_multiplied_in_place(path, tmp_path):
    x, formats = random(20, 64), all_formats(random(33, 64, seed=1))
    for number, weight in enumerate(formats):
        usual = product(x, weight)
        quantised = isinstance(weight, Quantized)
        np.save(tmp_path / f"{number}.npy", weight.values if quantised else weight)
        mapped = np.load(tmp_path / f"{number}.npy", mmap_mode="r")
        mapped = Quantized(mapped, weight.scales, weight.inputs) if quantised else mapped
        np.testing.assert_array_equal(product(x, mapped), usual)


def test_the_second_product_works_in_the_memory_of_the_first(path):
    x, formats = random(40, 96), all_formats(random(33, 96, seed=1))
    for stored in formats:
        product(x, stored)
    before = {name: id(array) for name, array in workspace.work.arrays.items()}
    for stored in formats:
        product(x, stored)
    assert {name: id(array) for name, array in workspace.work.arrays.items()} == before
