"""Products: when both implementations are timed, which one is called, and that their results agree."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.cuda.linear import Product, Products, Timing


class Library:
    """NumPy's product, with its calls counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Any, weight: Any, out: Any) -> None:
        self.calls += 1
        np.matmul(x, weight.T, out=out)


class StubTimer:
    """Gives out the times it was made with, ours and the library's in turn."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        return self.seconds.pop(0)


def linear(products: Products, rows: int) -> float:
    """One product with everything; the largest error against the formula."""
    rng = np.random.default_rng(rows)
    x, weight = rng.standard_normal((rows, 24)).astype("f"), rng.standard_normal((10, 24)).astype("f")
    bias, residual = rng.standard_normal(10).astype("f"), rng.standard_normal((rows, 10)).astype("f")
    out = np.full((rows, 10), np.nan, "f")
    products.linear(Product(x, weight, bias, out, "relu", residual))
    return float(np.abs(out - (np.maximum(x @ weight.T + bias, 0) + residual)).max())


@pytest.mark.parametrize(("ours", "theirs", "calls"), [(1.0, 2.0, 1), (2.0, 1.0, 4)])
def test_the_faster_one_is_used_from_then_on(emulator: Emulator, ours: float, theirs: float, calls: int) -> None:
    library = Library()
    products = Products(Kernels(emulator, "float32"), library, StubTimer(ours, theirs))
    for rows in 20, 32, 17:  # one bucket: the timer has times for one only
        assert linear(products, rows) < 1e-5
    assert library.calls == calls  # one to be timed, and then one for each product if it is faster
    assert products.timings == {(32, 10, 24): Timing(20, {"ours": ours, "library": theirs})}


def test_each_power_of_two_is_timed_by_itself(emulator: Emulator) -> None:
    products = Products(Kernels(emulator, "float32"), Library(), StubTimer(1.0, 2.0, 2.0, 1.0))
    linear(products, 32)
    linear(products, 33)
    assert [timing.chosen for timing in products.timings.values()] == ["ours", "library"]
    header, first, second = products.table().splitlines()
    assert header.split()[:3] == ["rows", "out", "in"]
    assert first.split()[:3] == ["32", "10", "24"] and first.endswith("ours")
    assert second.split()[:3] == ["33", "10", "24"] and second.endswith("library")


def test_few_rows_are_always_ours(emulator: Emulator) -> None:
    products = Products(Kernels(emulator, "float32"), Library(), StubTimer())
    assert linear(products, 16) < 1e-5
    assert not products.timings


def test_without_a_timer_only_ours(emulator: Emulator) -> None:
    products = Products(Kernels(emulator, "float32"), None, None)
    assert linear(products, 40) < 1e-5


def test_while_a_graph_is_captured_only_ours(emulator: Emulator) -> None:
    """CuPy refuses cuBLAS then, and a timing would wait for the device."""
    library = Library()
    products = Products(Kernels(emulator, "float32"), library, StubTimer(2.0, 1.0))
    with products.only_ours():
        assert linear(products, 40) < 1e-5
    assert not products.timings and not library.calls
    linear(products, 40)
    with products.only_ours():
        linear(products, 40)
    assert library.calls == 2  # timed, and used because it is faster; not in the second block


def test_float_logits_of_half_weights_are_ours(emulator: Emulator) -> None:
    library = Library()
    products = Products(Kernels(emulator, "float16"), library, StubTimer())
    x, weight = np.ones((40, 24), np.float16), np.ones((10, 24), np.float16)
    out = np.zeros((40, 10), np.float32)
    products.linear(Product(x, weight, None, out))
    assert (out == 24).all() and not library.calls and not products.timings
