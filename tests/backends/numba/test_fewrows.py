"""Products of few rows against float64, in every format; and that neither rows nor threads change a bit."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

numba = pytest.importorskip("numba", reason="the compiled kernels need numba: pip install 'minillm[fast]'")

from minillm import reference  # noqa: E402
from minillm.backends.numba.activations import ACTIVATION_CODES  # noqa: E402
from minillm.backends.numba.avx512 import HAS_INTEGER_TILES  # noqa: E402
from minillm.backends.numba.compiling import num_threads, set_threads  # noqa: E402
from minillm.backends.numba.fewrows import linear_few  # noqa: E402
from minillm.backends.numba.manyrows import linear_many  # noqa: E402
from minillm.reference.quantize import dequantize, quantize  # noqa: E402

ROUNDED = {"int4"} if HAS_INTEGER_TILES else set()
"""Formats that rows are rounded to int8 for."""
FORMATS = ["float32", "float16", "bfloat16", "int8", "int4"]
SHAPES = [(768, 50), (32, 24), (77, 25), (33, 1), (20, 7), (1, 3), (96, 100)]
"""(in, out): whole blocks and panels, a tail of inputs, of outputs, less than one block, less than one tile."""


def stored(weight: np.ndarray, form: str, group: int = 32) -> tuple[object, np.ndarray]:
    """A matrix as the kernel takes it, and the float32 numbers that it stands for."""
    if form == "float32":
        return weight, weight
    if form == "float16":
        return weight.astype(np.float16), weight.astype(np.float16).astype(np.float32)
    if form == "bfloat16":
        bits = (weight.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32)
    quantized = quantize(weight, 8 if form == "int8" else 4, group)
    return quantized, dequantize(quantized)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def run(x: np.ndarray, weight: object, outputs: int, bias: np.ndarray | None = None, **options) -> np.ndarray:
    return linear_few(x, weight, bias, np.full((len(x), outputs), np.nan, np.float32), **options)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_the_error_is_at_most_twice_that_of_plain_float32(form: str, inputs: int, outputs: int) -> None:
    weight, exact = stored(numbers(outputs, inputs), form)
    for rows in (1, 2, 5, 8, 11, 16, 19):
        x = numbers(rows, inputs, seed=1)
        expected = x.astype(np.float64) @ exact.T.astype(np.float64)
        plain = np.einsum("ri,oi->ro", x, exact)
        allowed = 2 * np.abs(plain - expected).max() + 1e-6
        if form in ROUNDED:
            allowed = allowed + rounding_bound(x, exact)
        assert (np.abs(run(x, weight, outputs) - expected) <= allowed).all()


def rounding_bound(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """How far products may move if x is rounded to 127ths of the largest of each 32. [T, in], [out, in] -> [T, out]"""
    starts = np.arange(0, x.shape[1], 32)
    largest = np.maximum.reduceat(np.abs(x), starts, axis=1)
    return 1.0001 / 254 * largest @ np.add.reduceat(np.abs(weight), starts, axis=1).T


@pytest.mark.skipif(not HAS_INTEGER_TILES, reason="this CPU has no AVX-512 VNNI")
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [*SHAPES, (3072, 33), (1600, 16)])
def test_rounded_rows_have_the_bits_of_products_of_many(inputs: int, outputs: int, group: int) -> None:
    weight, _ = stored(numbers(outputs, inputs), "int4", group)
    x, bias, residual = numbers(16, inputs, seed=1), numbers(outputs), numbers(16, outputs)
    x[0, :32], x[1] = 0, 1e-35  # groups of zeros, and of numbers too small for a scale
    for activation in ACTIVATION_CODES:
        many = linear_many(
            x, weight, bias, np.empty((16, outputs), np.float32), activation=activation, residual=residual
        )
        few = run(x, weight, outputs, bias, activation=activation, residual=residual)
        np.testing.assert_array_equal(few, many)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_alone_is_bitwise_the_row_in_a_batch(form: str, inputs: int, outputs: int) -> None:
    weight, _ = stored(numbers(outputs, inputs), form)
    x, bias, residual = numbers(16, inputs, seed=1), numbers(outputs), numbers(16, outputs)
    alone = [
        run(x[i : i + 1], weight, outputs, bias, activation="gelu", residual=residual[i : i + 1]) for i in range(16)
    ]
    for rows in range(1, 17):
        batch = run(x[:rows], weight, outputs, bias, activation="gelu", residual=residual[:rows])
        np.testing.assert_array_equal(batch, np.concatenate(alone[:rows]))


@pytest.mark.parametrize("form", FORMATS)
def test_the_number_of_threads_changes_no_bit(form: str) -> None:
    weight, _ = stored(numbers(100, 80), form)
    x = numbers(5, 80)
    before = num_threads()
    results = []
    try:
        for threads in range(1, min(numba.config.NUMBA_NUM_THREADS, 4) + 1):
            set_threads(threads)
            results.append(run(x, weight, 100))
    finally:
        set_threads(before)
    for result in results:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(
    ("activation", "with_bias", "with_residual"),
    itertools.product(ACTIVATION_CODES, [False, True], [False, True]),
)
def test_bias_activation_and_residual_are_those_of_the_reference(
    activation: str | None, with_bias: bool, with_residual: bool
) -> None:
    x, weight, bias, residual = numbers(3, 70), numbers(30, 70), numbers(30) * 5, numbers(3, 30)
    before = residual.copy()
    options = {"activation": activation, "residual": residual if with_residual else None}
    y = run(x, weight, 30, bias if with_bias else None, **options)
    wide = [a.astype(np.float64) for a in (x, weight, bias, residual)]
    expected = reference.linear(
        wide[0], wide[1], wide[2] if with_bias else None, np, np.empty((3, 30)),
        activation=activation, residual=wide[3] if with_residual else None,
    )  # fmt: skip
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(residual, before)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("inputs", [64, 90, 192])
def test_groups_of_64_share_a_scale(form: str, inputs: int) -> None:
    weight, exact = stored(numbers(30, inputs), form, group=64)
    x = numbers(3, inputs)
    allowed = 1e-5 + 1e-4 * np.abs(x @ exact.T) + (rounding_bound(x, exact) if form in ROUNDED else 0)
    assert (np.abs(run(x, weight, 30) - x @ exact.T) <= allowed).all()


@pytest.mark.parametrize("form", FORMATS)
def test_an_empty_batch_has_an_empty_result(form: str) -> None:
    weight, _ = stored(numbers(30, 64), form)
    assert run(np.empty((0, 64), np.float32), weight, 30).shape == (0, 30)


@pytest.mark.parametrize("form", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("inputs", [64, 77])
def test_weights_of_a_mapped_file_may_be_read_only_and_unaligned(form: str, inputs: int) -> None:
    weight, _ = stored(numbers(30, inputs), form)
    mapped = np.frombuffer(b"\0" + weight.tobytes(), np.uint8)[1:].view(weight.dtype).reshape(weight.shape)
    assert not mapped.flags.aligned and not mapped.flags.writeable
    x = numbers(9, inputs)
    np.testing.assert_array_equal(run(x, mapped, 30), run(x, weight, 30))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("inputs", [64, 65])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_shows(form: str, inputs: int, value: float) -> None:
    weight, _ = stored(np.abs(numbers(30, inputs)) + 1, form)
    x = numbers(3, inputs)
    x[1, inputs - 1] = value
    y = run(x, weight, 30, activation="relu")
    np.testing.assert_array_equal(y[1], np.full(30, np.nan if form in ROUNDED else value, np.float32))
    assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("form", ["float16", "bfloat16"])
def test_every_finite_16_bit_number_is_widened_exactly(form: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    weight = bits.view(np.float16) if form == "float16" else bits
    wide = weight.astype(np.float32) if form == "float16" else (bits.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(wide)
    column = np.repeat(weight[finite][:, None], 33, axis=1)  # a whole block and a tail of one
    for place in (3, 32):
        x = np.zeros((1, 33), np.float32)
        x[0, place] = 1
        np.testing.assert_array_equal(run(x, column, len(column))[0], wide[finite])


@pytest.mark.parametrize("cpu", [{"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}])
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="compiles for an x86-64 CPU")
@pytest.mark.slow
def test_a_cpu_without_avx512_gets_the_same_numbers(cpu: dict[str, str]) -> None:
    cases = "test_the_error or test_a_row_alone or test_groups or test_every_finite"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", cases, __file__]
    result = subprocess.run(command, env=os.environ | cpu, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
