"""Products with bitsandbytes' code books: bit for bit those with the weights in float32."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu.selftest import random_blocks
from minillm.reference.blocks import BLOCK_FORMATS, CODE_BOOKS, BlockMatrix, dequantize_blocks

from .test_linear import FEW, MANY, linear

RNG = np.random.default_rng
by_form = pytest.mark.parametrize("name", CODE_BOOKS)
SIZES = [(1, 64, 3), (2, 128, 7), (3, 768, 33), (5, 832, 33), (4, 64, 1), (16, 192, 50), (0, 64, 7), (1, 1600, 17)]
MORE_SIZES = [(17, 64, 3), (40, 128, 7), (33, 832, 33), (64, 192, 100), (70, 1024, 210)]


def case(name: str, rows: int, inputs: int, outputs: int) -> tuple[Any, BlockMatrix]:
    x = RNG(rows).standard_normal((rows, inputs)).astype(np.float32)
    return x, random_blocks(RNG(inputs), BLOCK_FORMATS[name], outputs, inputs)


@by_form
@pytest.mark.parametrize("one_order", [False, True])
@pytest.mark.parametrize(("kernel", "sizes"), [(FEW, SIZES), (MANY, SIZES + MORE_SIZES)])
def test_products_are_those_of_the_weights_in_float32(kernel: str, sizes: Any, one_order: bool, name: str) -> None:
    for rows, inputs, outputs in sizes:
        x, weight = case(name, rows, inputs, outputs)
        plain = dequantize_blocks(weight)
        ours, expected = (linear(kernel, x, w, shares=2, one_order=one_order) for w in (weight, plain))
        np.testing.assert_array_equal(ours, expected)
        exact = x.astype(np.float64) @ plain.T.astype(np.float64)
        assert np.abs(ours - exact).max(initial=0) <= 1e-5 * np.abs(exact).max(initial=0)


@by_form
def test_blocks_may_lie_anywhere(name: str) -> None:
    x, weight = case(name, 5, 192, 33)
    shifted = np.frombuffer(b"\0\0\0" + weight.blocks.tobytes(), np.uint8)[3:].reshape(weight.blocks.shape)
    for kernel in (FEW, MANY):
        ours = linear(kernel, x, BlockMatrix(shifted, weight.form))
        np.testing.assert_array_equal(ours, linear(kernel, x, weight))
