"""A mixture of experts on the kernels, run by the emulator: choice, order, products and sums against NumPy's."""

from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cuda import experts, rows
from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.storage import Experts
from minillm.reference.experts import RouterSpec, Routing
from minillm.reference.quantize import Quantized, dequantize, quantize

from .interleaving import on_device

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 in NumPy needs ml_dtypes")

STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def take(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array whose numbers are NaN, or no index, until they are written."""
    array = np.empty(shape, dtype)
    array.view("uint8")[...] = 0xFF
    return array


def routed(launcher: Emulator, T: int, X: int, k: int, *, normalised: bool = True, ties: bool = False) -> Routing:
    """The kernels' choice, held to the reference's."""
    logits = np.random.default_rng((T, X)).standard_normal((T, X)).astype(np.float32) * 2
    if ties:
        logits = np.round(logits)
    found = experts.route(Kernels(launcher, debug=True), logits, k, take, normalised=normalised)
    expected = reference.route(logits, k, np, normalised=normalised)
    for name in ("experts", "rows", "tokens", "starts"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-6)
    used = np.flatnonzero(np.diff(expected.starts))
    assert found.present.tolist() == [*used, *[-1] * (min(X, T * k) - len(used))]
    return found


@pytest.mark.parametrize(("T", "X", "k"), [(1, 8, 2), (9, 64, 8), (130, 40, 3)])
def test_experts_are_chosen_and_rows_sorted(any_emulator: Emulator, T: int, X: int, k: int) -> None:
    for normalised in (True, False):
        routed(any_emulator, T, X, k, normalised=normalised, ties=not normalised)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "spec",
    [
        RouterSpec(sigmoid=True),
        RouterSpec(sigmoid=True, groups=4, chosen_groups=2, scale=2.5),
        RouterSpec(groups=2, chosen_groups=1),
        RouterSpec(groups=4, chosen_groups=2, group_best=1),
    ],
    ids=["sigmoid", "groups", "softmax in groups", "the best of groups"],
)
def test_scores_biases_and_groups_are_the_references(emulator: Emulator, spec: RouterSpec, biased: bool) -> None:
    logits, bias = (np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in ((9, 40), 40))
    given: dict[str, Any] = {"normalised": not biased, "bias": bias if biased else None, "spec": spec}
    chosen = experts.route(Kernels(emulator, debug=True), logits, 5, take, **given)
    expected = reference.route(logits, 5, np, **given)
    for name in ("experts", "rows", "tokens", "starts"):
        np.testing.assert_array_equal(getattr(chosen, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(chosen.weights, expected.weights, rtol=1e-6)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize(("n", "silu"), [(1, False), (5, False), (70, False), (70, True)])
def test_a_gate_is_the_references(emulator: Emulator, storage: str, n: int, silu: bool) -> None:
    rng, dtype = np.random.default_rng(n), STORAGE[storage]
    x, logits = (rng.standard_normal((3, width)).astype(dtype) for width in (70, n))
    out = take((3, 70), dtype)
    rows.gate(Kernels(emulator, storage, debug=True), x, logits, out, silu=silu)
    exact = reference.gate(x.astype(np.float64), logits.astype(np.float64), np, np.empty((3, 70)), silu=silu)
    np.testing.assert_allclose(
        out.astype(np.float64), exact, rtol=4 * UNIT[storage], atol=1e-7
    )  # float16 below its least normal number


@pytest.mark.parametrize("normalised", [True, False])
def test_factors_of_experts_are_the_references(emulator: Emulator, normalised: bool) -> None:
    logits, factors = (np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in ((9, 40), 40))
    given: dict[str, Any] = {"normalised": normalised, "factors": factors}
    chosen = experts.route(Kernels(emulator, debug=True), logits, 5, take, **given)
    expected = reference.route(logits, 5, np, **given)
    np.testing.assert_allclose(chosen.weights, expected.weights, rtol=1e-6)


def test_logits_that_are_no_numbers_still_choose_different_experts(emulator: Emulator) -> None:
    """The weights are NaN, which ends the request; the kernels after this one must find rows of theirs."""
    logits = np.full((3, 5), np.nan, np.float32)
    logits[1] = -np.inf
    logits[2, 3] = 1
    found = experts.route(Kernels(emulator, debug=True), logits, 3, take, normalised=True)
    assert found.experts.tolist() == [[0, 1, 2], [0, 1, 2], [3, 0, 1]]
    assert sorted(found.rows.ravel()) == [*range(9)]


@pytest.mark.parametrize(
    ("storage", "bits"), [("float32", 32), ("float16", 16), ("bfloat16", 16), ("float16", 8), ("bfloat16", 4)]
)
@pytest.mark.parametrize(("T", "X"), [(3, 4), (40, 2)])
def test_products_and_sums(any_emulator: Emulator, storage: str, T: int, X: int, bits: int) -> None:
    """All experts in one launch: experts without rows, with one, and with more than the kernel takes at a time."""
    rng, dtype, inputs, outputs = np.random.default_rng(T), STORAGE[storage], 70, 37
    routing = routed(any_emulator, T, X, 2)
    whole: Any = (rng.standard_normal((X * outputs, inputs)) / 8).astype(np.float32)
    whole = whole.astype(dtype) if bits >= 16 else quantize(whole, bits)
    numbers = (dequantize(whole) if isinstance(whole, Quantized) else whole).astype(np.float64)
    there = on_device(whole) if isinstance(whole, Quantized) else whole
    x = rng.standard_normal((2 * T, inputs)).astype(dtype)
    around = np.full((2 * T + 2, outputs), -77, dtype)
    kernels, out = Kernels(any_emulator, storage, debug=True), around[1:-1]
    matrices = tuple(numbers.reshape(X, outputs, inputs))
    biases = None if T == 3 and bits == 16 else rng.standard_normal((X, outputs)).astype(np.float32)
    experts.multiply(kernels, x, Experts(matrices, there), routing, out, biases)
    expected = np.empty(out.shape)
    reference.linear_experts(x.astype(np.float64), lambda e: matrices[e], routing.starts, np, expected, biases)
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2 * UNIT[storage], atol=1e-5)
    assert (around[[0, -1]] == -77).all()

    residual = rng.standard_normal((T, outputs)).astype(dtype)
    for added in (None, residual):
        total = np.empty((T, outputs), dtype)
        experts.combine(kernels, out, routing, added, total)
        wide = None if added is None else added.astype(np.float64)
        expected = reference.combine(out.astype(np.float64), routing, wide, np, np.empty((T, outputs)))
        np.testing.assert_allclose(total.astype(np.float64), expected, rtol=UNIT[storage], atol=1e-6)
