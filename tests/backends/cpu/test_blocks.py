"""Products with blocks of GGUF files, against float64 products of their weights and of x as the kernel rounds it."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu.selftest import random_blocks
from minillm.reference.blocks import BLOCK_FORMATS, CODE_BOOKS, BlockFormat, BlockMatrix, dequantize_blocks, in_pairs

from .test_linear import FEW, MANY, Product, error_of, exact_weight, exact_x, linear, program

RNG = np.random.default_rng
FORMATS = [form for form in BLOCK_FORMATS.values() if form.name not in CODE_BOOKS]
by_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


def matrix(form: BlockFormat, outputs: int, inputs: int, seed: int = 0) -> BlockMatrix:
    return random_blocks(RNG(seed), form, outputs, inputs)


def case(form: BlockFormat, rows: int, inputs: int, outputs: int, seed: int = 0) -> tuple[Any, BlockMatrix]:
    return RNG(seed).standard_normal((rows, inputs)).astype(np.float32), matrix(form, outputs, inputs, seed)


def sizes_of(form: BlockFormat, *sizes: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Rows, blocks and outputs as rows, inputs and outputs."""
    return [(rows, blocks * form.numbers, outputs) for rows, blocks, outputs in sizes]


SIZES = [(1, 1, 3), (2, 3, 7), (3, 4, 33), (5, 1, 33), (4, 2, 1), (16, 3, 50), (1, 7, 64), (6, 25, 17), (0, 1, 7)]
MORE_SIZES = [(17, 1, 3), (40, 2, 7), (33, 4, 33), (64, 3, 100), (70, 2, 210)]


@by_format
@pytest.mark.parametrize(("kernel", "sizes"), [(FEW, SIZES), (MANY, SIZES + MORE_SIZES)])
def test_products_are_as_good_as_sums_in_float32(kernel: str, sizes: Any, form: BlockFormat) -> None:
    for rows, inputs, outputs in sizes_of(form, *sizes):
        x, weight = case(form, rows, inputs, outputs)
        out = linear(kernel, x, weight, shares=2)
        assert out.shape == (rows, outputs) and error_of(out, x, weight) < 8, (rows, inputs, outputs)
        if rows:
            exact = exact_x(x, weight) @ exact_weight(weight).T
            assert np.abs(out - exact).max() < 1e-6 * np.abs(exact).max()


@by_format
def test_the_exact_weights_of_these_tests_are_the_dequantised_ones(form: BlockFormat) -> None:
    weight = matrix(form, 9, 3 * form.numbers)
    np.testing.assert_allclose(exact_weight(weight), dequantize_blocks(weight), rtol=1e-6, atol=1e-7)


@by_format
@pytest.mark.parametrize("kernel", [FEW, MANY])
def test_products_of_the_largest_integers_do_not_overflow(kernel: str, form: BlockFormat) -> None:
    weight = matrix(form, 40, 512)
    for fill in (255, 0, 0xF0, 0x0F):
        weight.blocks[:] = matrix(form, 40, 512).blocks
        blocks = weight.blocks.reshape(40, -1, form.bytes)
        blocks[..., 16 : form.bytes - 18] = fill
        signs = np.ones((6, 512), np.float32)
        signs[3:, ::2] = -1
        for x in (signs, -signs):
            assert error_of(linear(kernel, x, weight), x, weight) < 8


@by_format
def test_the_same_bits_for_any_number_of_rows_shares_and_threads(form: BlockFormat) -> None:
    for blocks, outputs in ((1, 7), (4, 50), (25, 33), (3, 210)):
        rng, most = RNG(3), 70 if outputs > 100 else 40
        x, weight = case(form, most, blocks * form.numbers, outputs, 3)
        bias = rng.standard_normal(outputs).astype(np.float32)
        residual = rng.standard_normal((most, outputs)).astype(np.float32)
        together = linear(MANY, x, weight, bias, "gelu", residual)
        for kernel in (FEW, MANY):
            for shares, workers in ((1, 1), (2, 1), (7, 2), (64, 3)):
                again = linear(kernel, x, weight, bias, "gelu", residual, shares=shares, workers=workers)
                np.testing.assert_array_equal(again, together)
            for rows in (*range(1, 17), 17, 23, most - 6):
                part = slice(3, 3 + rows)
                some = linear(kernel, x[part], weight, bias, "gelu", residual[part], shares=3)
                np.testing.assert_array_equal(some, together[part], err_msg=f"{kernel}, {rows} rows")


@by_format
@pytest.mark.parametrize("kernel", [FEW, MANY])
def test_what_is_not_finite_is_not_in_the_result(kernel: str, form: BlockFormat) -> None:
    x, weight = case(form, 7, 512, 33)
    good = linear(kernel, x, weight)
    spoilt = x.copy()
    spoilt[3, 500] = np.nan
    out = linear(kernel, spoilt, weight)
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(good, 3, 0))


@by_format
def test_blocks_are_not_read_beyond_their_end_and_may_lie_anywhere(form: BlockFormat) -> None:
    """Under a sanitizer, or an allocator's guard, a byte more is seen."""
    x, weight = case(form, 5, 3 * form.numbers, 33)
    shifted = np.frombuffer(b"\0\0\0\0\0" + weight.blocks.tobytes(), np.uint8)[5:].reshape(weight.blocks.shape)
    for kernel in (FEW, MANY):
        out = linear(kernel, x, BlockMatrix(shifted, form))
        np.testing.assert_array_equal(out, linear(kernel, x, weight))


def test_pairs_of_blocks_give_the_bits_of_single_ones() -> None:
    """A file that is mapped and one that is copied give the same tokens."""
    for rows, inputs, outputs in ((1, 64, 3), (3, 576, 33), (40, 1536, 50)):
        x, single = case(BLOCK_FORMATS["Q5_0"], rows, inputs, outputs)
        pairs = BlockMatrix(in_pairs(single.blocks), BLOCK_FORMATS["Q5_0X2"])
        for kernel in (FEW, MANY):
            np.testing.assert_array_equal(linear(kernel, x, pairs), linear(kernel, x, single))


def test_products_share_a_program() -> None:
    products = [Product(FEW, *case(form, 3, 512, 20), workers=2) for form in FORMATS]
    program(products, 4, 2)()
    for form, product in zip(FORMATS, products, strict=True):
        np.testing.assert_array_equal(product.out, linear(FEW, *case(form, 3, 512, 20)))
