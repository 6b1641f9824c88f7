"""Matrix products, against float64; those of integers against x rounded as the kernel should round it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu.matrices import ROUNDING
from minillm.backends.formats import FORMATS as NARROW
from minillm.backends.storage import expand, narrow
from minillm.reference.blocks import BlockMatrix
from minillm.reference.quantize import Quantized, dequantize, quantize

from . import kernels
from .kernels import integer

FORMATS = ["float32", "float16", "bfloat16", "bfloat16 and x", "int8x32", "int8x64", "int4x32", "int4x64",
           "int4x32 with offsets", "int4x64 with offsets", "int4x32 with zero points",
           "int4x64 with zero points"]  # fmt: skip
FLOATS, INTEGERS = FORMATS[:4], FORMATS[4:]
FEW, MANY = "linear_few", "linear_many"
RNG = np.random.default_rng


class Rounding(np.ndarray):
    """A matrix of bfloat16 that meets x rounded to bfloat16."""


def aligned(count: int, dtype: Any) -> Any:
    """Exactly so many numbers, filled with 0x7F; a reader of one more meets the allocator's guard."""
    size = count * np.dtype(dtype).itemsize
    memory = np.full(size + 64, 0x7F, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype)


class Product:
    """A product's arguments and memory."""

    def __init__(
        self, kernel: str, x: Any, weight: Any, bias: Any = None, activation: str | None = None, residual: Any = None,
        workers: int = 1, one_order: bool = False,
    ) -> None:  # fmt: skip
        rows, inputs = x.shape
        self.kernel, self.workers = kernel, workers
        outputs, offsets = weight.shape[0], None
        self.out = np.full((rows, outputs), np.nan, np.float32)
        if isinstance(weight, Quantized):
            values, scales, group, form = weight.values, weight.scales, weight.group, f"int{weight.bits}"
            offsets = weight.offsets
        elif isinstance(weight, BlockMatrix):
            values, scales, group, form = weight.blocks, None, 32, weight.form.name
        else:
            name = weight.dtype.name
            values, scales, group, form = weight, None, 32, {"uint16": "bfloat16"}.get(name, name)
        code, groups, library = kernels.FORMATS[form], -(-inputs // group) * group // 32, kernels.loaded()
        self.rounds = code in ROUNDING or isinstance(weight, Rounding)
        wide = int(code in ROUNDING and kernel == MANY and library.wide_rows(integer(code)) > 0)
        x_rounded = aligned((rows * groups * 32 + 32) * (1 + wide), np.int8) if self.rounds else None
        if isinstance(weight, Rounding):
            x_rounded = aligned(4 * rows * inputs, np.int8)
        stride = -(-groups // 16) * 16
        x_scales = aligned(rows * stride, np.float32)
        x_sums = aligned(rows * stride * (library.sum_parts(integer(code)) if code in ROUNDING else 1), np.int32)
        scratch = aligned(kernels.loaded().linear_scratch() * workers, np.uint8)
        arrays = [values, scales, offsets, bias, residual, x, self.out, x_rounded, x_scales, x_sums, scratch]
        self.kept = arrays
        names = ["weight", "scales", "offsets", "bias", "residual", "x", "out", "x_rounded", "x_scales", "x_sums",
                 "scratch"]  # fmt: skip
        self.arguments = kernels.fill(
            kernels.LinearArguments, **dict(zip(names, arrays, strict=True)), rows=rows, inputs=inputs, outputs=outputs,
            format=kernels.FORMATS[form], group=group, activation=kernels.ACTIVATIONS[activation], wide=wide,
            zeros=int(isinstance(weight, Quantized) and weight.has_zeros), one_order=one_order, stride=outputs,
        )  # fmt: skip

    def launches(self, shares: int) -> list[tuple[str, int]]:
        return [("round_rows", min(shares, max(1, self.arguments.rows)))] * self.rounds + [(self.kernel, shares)]


def program(products: list[Product], shares: int, workers: int) -> Any:
    """A function that runs products one after the other."""

    def run() -> None:
        for product in products:
            for name, count in product.launches(shares):
                kernels.run(name, product.arguments, count, workers)

    return run


def linear(
    kernel: str, x: Any, weight: Any, *extras: Any, shares: int = 1, workers: int = 1, one_order: bool = False
) -> np.ndarray:
    product = Product(kernel, x, weight, *extras, workers=workers, one_order=one_order)
    program([product], shares, workers)()
    return product.out


def store(plain: Any, form: str) -> Any:
    if form == "bfloat16 and x":
        return narrow(plain, NARROW["bfloat16"]).view(Rounding)
    name, _, group = form.partition("x")
    if group:
        group, _, offsets = group.partition(" with ")
        return kernels.with_offsets(quantize(plain, int(name[3:]), int(group)), offsets)
    return plain.astype(np.float32) if form == "float32" else narrow(plain, NARROW[form])


def parts_of(weight: Quantized | BlockMatrix) -> tuple[np.ndarray, np.ndarray]:
    """The products of scales and integers, and what is added to them; float64 [outputs, inputs]"""
    if isinstance(weight, BlockMatrix):
        scales, integers, offsets = weight.form.split(weight.blocks.reshape(-1, weight.form.bytes))
        scales = np.repeat(scales.astype(np.float64), weight.group, axis=1)
        excess = {"Q6_K": 32, "Q5_0": 16, "MXFP4": 12, "NVFP4": 12, "Q3_K": 4}.get(weight.form.name, 0)
        added = -excess * scales if offsets is None else np.repeat(offsets.astype(np.float64), weight.group, axis=1)
        return ((integers + excess) * scales).reshape(weight.shape), added.reshape(weight.shape)
    values = replace(weight, scales=np.ones_like(weight.scales), offsets=None)
    integers = dequantize(values).astype(np.float64)

    def by_column(array: Any) -> np.ndarray:
        return np.repeat(array.astype(np.float64), weight.group, axis=1)[:, : weight.inputs]

    scales = by_column(weight.scales)
    if weight.offsets is None:
        return integers * scales, np.zeros_like(scales)
    added = by_column(weight.offsets) * (-scales if weight.has_zeros else 1)
    return (integers + 8) * scales, added


def exact_weight(weight: Any) -> np.ndarray:
    """float64 [outputs, inputs]"""
    if isinstance(weight, Quantized | BlockMatrix):
        return sum(parts_of(weight))
    return expand(weight, np.arange(len(weight))).astype(np.float64)


def exact_x(x: Any, weight: Any) -> np.ndarray:
    """The left factor in float64: x, or integers x scale of each 32 numbers, or rounded to bfloat16."""
    if isinstance(weight, Rounding):
        return expand(narrow(x, NARROW["bfloat16"]), np.arange(len(x))).astype(np.float64)
    if not isinstance(weight, Quantized | BlockMatrix):
        return x.astype(np.float64)
    padded = np.zeros((len(x), -(-x.shape[1] // 32) * 32), np.float32)
    padded[:, : x.shape[1]] = x
    groups = padded.reshape(len(x), padded.shape[1] // 32, 32)
    most = np.abs(groups).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(most > 1e-36, np.float32(127) / most, np.float32(0))
    rounded = np.rint(groups * inverse) * (most / np.float32(127)).astype(np.float64)
    return rounded.reshape(padded.shape)[:, : x.shape[1]]


def exact_activation(name: str | None, x: np.ndarray) -> np.ndarray:
    import math

    if name == "gelu":
        return x * np.vectorize(math.erfc, otypes=[float])(-x / np.sqrt(2)) / 2
    if name == "gelu_new":
        return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x)))
    if name == "silu":
        return x / (1 + np.exp(-x))
    return np.maximum(x, 0) ** (1 + (name == "relu2")) if name else x


def error_of(out: np.ndarray, x: Any, weight: Any) -> float:
    """The largest error in roundings (2^-24) of the sum of the terms' magnitudes."""
    xs, ws = exact_x(x, weight), exact_weight(weight)
    sizes = (
        np.abs(xs) @ (sum(map(np.abs, parts_of(weight))) if not isinstance(weight, np.ndarray) else np.abs(ws)).T
        + 1e-30
    )
    return float((np.abs(out - xs @ ws.T) / sizes).max(initial=0) * 2**24)


def case(form: str, rows: int, inputs: int, outputs: int, seed: int = 0) -> tuple[Any, Any]:
    rng = RNG(seed)
    plain = rng.standard_normal((outputs, inputs)).astype(np.float32) / 8
    return rng.standard_normal((rows, inputs)).astype(np.float32), store(plain, form)


SIZES = [(1, 4, 3), (2, 20, 7), (3, 100, 33), (5, 1000, 33), (4, 7, 1), (16, 96, 50), (1, 3, 64), (7, 768, 5),
         (6, 1601, 17), (8, 160, 16), (0, 20, 7)]  # fmt: skip
MORE_SIZES = [(17, 4, 3), (40, 20, 7), (18, 100, 33), (33, 1000, 33), (64, 96, 100), (23, 1700, 18), (65, 20, 7),
              (70, 1000, 210)]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("kernel", "sizes"), [(FEW, SIZES), (MANY, SIZES + MORE_SIZES)])
def test_products_are_as_good_as_sums_in_float32(kernel: str, sizes: Any, form: str) -> None:
    for rows, inputs, outputs in sizes:
        x, weight = case(form, rows, inputs, outputs)
        out = linear(kernel, x, weight, shares=2)
        assert out.shape == (rows, outputs) and error_of(out, x, weight) < 8, (rows, inputs, outputs)


@pytest.mark.parametrize("form", INTEGERS)
@pytest.mark.parametrize("kernel", [FEW, MANY])
def test_products_of_the_largest_integers_do_not_overflow(kernel: str, form: str) -> None:
    for sign in (1, -1):
        weight = store(np.full((40, 128), sign, np.float32), form)
        weight.values[:] = 0 if form.startswith("int4") else -127 if sign < 0 else 127
        weight.values[1::2] = 255 if form.startswith("int4") else -128
        for x in (np.ones((6, 128), np.float32), -np.ones((6, 128), np.float32)):
            assert error_of(linear(kernel, x, weight), x, weight) < 8


@pytest.mark.parametrize("kernel", [FEW, MANY])
@pytest.mark.parametrize("activation", list(kernels.ACTIVATIONS))
def test_bias_activation_and_residual(kernel: str, activation: str | None) -> None:
    rng = RNG(1)
    for form in ("float32", "int4x32"):
        for with_bias, with_residual in ((True, True), (False, True), (True, False), (False, False)):
            x, weight = case(form, 5, 100, 61)
            bias = rng.standard_normal(61).astype(np.float32) if with_bias else None
            residual = rng.standard_normal((5, 61)).astype(np.float32) if with_residual else None
            out = linear(kernel, x, weight, bias, activation, residual, shares=3)
            expected = exact_x(x, weight) @ exact_weight(weight).T + (0 if bias is None else bias)
            expected = exact_activation(activation, expected) + (0 if residual is None else residual)
            np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMATS)
def test_the_same_bits_for_any_number_of_rows_shares_and_threads(form: str) -> None:
    for inputs, outputs in ((20, 7), (96, 50), (1000, 64), (1601, 33), (800, 210)):
        rng, most = RNG(3), 70 if outputs > 100 else 40
        x, weight = case(form, most, inputs, outputs, 3)
        bias = rng.standard_normal(outputs).astype(np.float32)
        residual = rng.standard_normal((most, outputs)).astype(np.float32)
        results = {}
        for kernel in (FEW, MANY):
            together = results[kernel] = linear(kernel, x, weight, bias, "gelu", residual)
            for shares, workers in ((2, 1), (7, 2), (64, 3)):
                again = linear(kernel, x, weight, bias, "gelu", residual, shares=shares, workers=workers)
                np.testing.assert_array_equal(again, together)
            for rows in (*range(1, 17), 17, 23, most - 6):
                part = slice(3, 3 + rows)
                some = linear(kernel, x[part], weight, bias, "gelu", residual[part], shares=3)
                as_few = (some == results[FEW][part]).all()  # of linear_many where W is not worth transposing
                assert as_few or (some == together[part]).all(), f"{kernel}, {rows} rows"
        if form in FLOATS:
            np.testing.assert_allclose(results[FEW], results[MANY], rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(results[FEW], results[MANY])


class Rows:
    """Rows of x with all else of their product, in one order of summation; some of them are multiplied at a time."""

    def __init__(self, form: str, inputs: int, outputs: int) -> None:
        rng, self.count = RNG(5), 200
        self.x, self.weight = case(form, self.count, inputs, outputs, 5)
        self.bias = rng.standard_normal(outputs).astype(np.float32)
        self.residual = rng.standard_normal((self.count, outputs)).astype(np.float32)

    def multiplied(self, rows: Any, **launch: Any) -> np.ndarray:
        arguments = self.x[rows], self.weight, self.bias, "gelu", self.residual[rows]
        return linear(FEW if len(rows) <= 16 else MANY, *arguments, one_order=True, **launch)

    def compare(self, companies: int) -> int:
        """Hold rows in random companies, shares and threads against each row alone; the number of rows compared."""
        rng, compared = RNG(6), 0
        alone = np.concatenate([self.multiplied([row]) for row in range(self.count)])
        for _ in range(companies):
            rows = rng.choice(self.count, rng.choice([2, 5, 16, 17, 40, 64, 65, 150]), replace=False)
            together = self.multiplied(rows, shares=int(rng.integers(1, 9)), workers=int(rng.integers(1, 4)))
            np.testing.assert_array_equal(together, alone[rows])
            compared += len(rows)
        return compared


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_has_the_same_bits_in_any_company(form: str) -> None:
    assert sum(Rows(form, *size).compare(8) for size in ((20, 7), (1601, 33))) > 400


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_ten_thousand_rows_have_the_same_bits_in_any_company(form: str) -> None:
    """10^5 rows of all forms, each with all its outputs."""
    sizes = ((20, 7), (96, 50), (768, 64), (800, 210), (1601, 33))
    assert sum(Rows(form, *size).compare(45) for size in sizes) > 9_100


@pytest.mark.parametrize("form", FLOATS)
def test_another_order_of_summation_is_seen(form: str) -> None:
    x, weight = case(form, 40, 1000, 33)
    first, second = (
        linear(MANY, *(part.copy() for part in (x[:, half], weight[:, half])), one_order=True)
        for half in (slice(500), slice(500, None))
    )
    whole = linear(MANY, x, weight, one_order=True)
    np.testing.assert_allclose(first + second, whole, rtol=1e-4, atol=1e-4)
    assert (first + second != whole).mean() > 0.1


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kernel", [FEW, MANY])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_give_results_that_are_not(kernel: str, form: str, bad: float) -> None:
    for inputs, place in ((20, 19), (1000, 0), (1000, 999), (96, 33), (160, 150)):
        x, weight = case(form, 7, inputs, 33)
        good = linear(kernel, x, weight)
        for row in (0, 3, 6):
            spoilt = x.copy()
            spoilt[row, place] = bad
            out = linear(kernel, spoilt, weight)
            assert not np.isfinite(out[row]).any() and (form in FLOATS or np.isnan(out[row]).all())
            np.testing.assert_array_equal(np.delete(out, row, 0), np.delete(good, row, 0))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kernel", [FEW, MANY])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_give_results_that_are_not(kernel: str, form: str, bad: float) -> None:
    for inputs, place in ((20, 19), (1000, 0), (1000, 999), (96, 95)):
        for output in (0, 6, 32):
            x, weight = case(form, 7, inputs, 33)
            good = linear(kernel, x, weight)
            if isinstance(weight, Quantized):
                weight.scales[output, place // weight.group] = bad
            else:
                weight[output, place] = store(np.array([[bad]], np.float32), form)[0, 0]
            out = linear(kernel, x, weight)
            assert not np.isfinite(out[:, output]).any()
            np.testing.assert_array_equal(np.delete(out, output, 1), np.delete(good, output, 1))


@pytest.mark.parametrize("kernel", [FEW, MANY])
def test_rounding_of_very_small_very_large_and_zero_numbers(kernel: str) -> None:
    x, weight = case("int8x32", 5, 96, 9)
    x *= np.array([[1e-30], [1e-40], [0], [3e36], [1]], np.float32)
    x[4, :32] = 0
    out = linear(kernel, x, weight)
    assert error_of(out[[0, 2, 3, 4]], x[[0, 2, 3, 4]], weight) < 8
    assert (out[1] == 0).all() and (out[2] == 0).all()


def test_arrays_may_lie_at_odd_addresses() -> None:
    x, weight = case("float32", 5, 100, 33)

    def moved(array: Any) -> Any:
        memory = np.frombuffer(b"\0\0\0\0\0" + array.tobytes(), np.uint8)[5:]
        return memory.view(array.dtype).reshape(array.shape).view(type(array))

    for form in FORMATS:
        weight = case(form, 5, 100, 33)[1]
        quantized = isinstance(weight, Quantized)
        other = weight.each(moved) if quantized else moved(weight)
        for kernel in (FEW, MANY):
            np.testing.assert_array_equal(linear(kernel, moved(x), other), linear(kernel, x, weight))
