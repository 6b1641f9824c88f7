"""Products: which are the library's, by their rows alone, and that both have the same results."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.cuda.linear import LIBRARY_ROWS, MOST_ROWS, SPLIT_ROWS, Product, Products


class Library:
    """NumPy's product, with its calls counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Any, weight: Any, out: Any) -> None:
        self.calls += 1
        np.matmul(x, weight.T, out=out)


def linear(products: Products, rows: int) -> float:
    """One product with everything; the largest error against the formula."""
    rng = np.random.default_rng(rows)
    x, weight = rng.standard_normal((rows, 24)).astype("f"), rng.standard_normal((10, 24)).astype("f")
    bias, residual = rng.standard_normal(10).astype("f"), rng.standard_normal((rows, 10)).astype("f")
    out = np.full((rows, 10), np.nan, "f")
    products.linear(Product(x, weight, bias, out, "relu", residual))
    return float(np.abs(out - (np.maximum(x @ weight.T + bias, 0) + residual)).max())


def test_the_library_has_products_of_many_rows_whatever_ran_before(emulator: Emulator) -> None:
    """So a prompt has the same bits in every process."""
    library = Library()
    products = Products(Kernels(emulator, "float32"), library)
    calls = []
    for rows in (40, 16, 17, 1, 40, 16, 17):
        assert linear(products, rows) < 1e-5
        calls.append(library.calls)
    assert calls == [1, 1, 2, 2, 3, 3, 4]


def test_rows_of_decode_steps_are_ours_with_16_bits(emulator: Emulator) -> None:
    library = Library()
    products = Products(Kernels(emulator, "float16"), library)
    weight, calls = np.ones((10, 24), np.float16), []
    for rows in (MOST_ROWS["float16"], SPLIT_ROWS, SPLIT_ROWS + 1):
        out = np.zeros((rows, 10), np.float16)
        products.linear(Product(np.ones((rows, 24), np.float16), weight, None, out))
        assert (out == 24).all()
        calls.append(library.calls)
    assert calls == [0, 0, 1]


def test_without_a_library_only_ours(emulator: Emulator) -> None:
    assert linear(Products(Kernels(emulator, "float32"), None), 40) < 1e-5


def test_while_a_graph_is_captured_only_ours(emulator: Emulator) -> None:
    """CuPy refuses cuBLAS then."""
    library = Library()
    products = Products(Kernels(emulator, "float32"), library)
    with products.only_ours():
        assert linear(products, 40) < 1e-5
    assert not library.calls
    linear(products, 40)
    assert library.calls == 1


@pytest.mark.parametrize("rows", [40, SPLIT_ROWS + 2])
def test_float_logits_of_half_weights_are_ours(emulator: Emulator, rows: int) -> None:
    library = Library()
    products = Products(Kernels(emulator, "float16"), library)
    x, weight = np.ones((rows, 24), np.float16), np.ones((10, 24), np.float16)
    out = np.zeros((rows, 10), np.float32)
    products.linear(Product(x, weight, None, out))
    assert (out == 24).all() and not library.calls


def test_the_library_begins_above_what_ours_reads_once() -> None:
    assert all(LIBRARY_ROWS[storage] > rows for storage, rows in MOST_ROWS.items())
