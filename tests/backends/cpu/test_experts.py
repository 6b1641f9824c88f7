"""The kernels of a mixture of experts: the reference's routing and sums, and the bits of each expert's own product."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.cpu.launching import num_threads, set_threads
from minillm.backends.cpu.selftest import random_blocks
from minillm.backends.storage import Experts, expand
from minillm.backends.weights import Weight
from minillm.reference.blocks import BLOCK_FORMATS
from minillm.reference.experts import RouterSpec, Routing, combine, route
from minillm.reference.gates import gate, multiply

from ...tiny import Held
from .kernels import with_offsets

X, INPUTS, OUTPUTS = 6, 70, 37
"""Neither a multiple of a vector nor of a group of 32"""


@pytest.fixture(params=[1, 3])
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    """On one thread, and on three."""
    before = num_threads()
    set_threads(request.param)
    yield CpuBackend()
    set_threads(before)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def routing_to(used: list[int], tokens: int, k: int) -> Routing:
    """Tokens that choose among some of the experts only."""
    logits = random(tokens, X, seed=3)
    logits[:, [e for e in range(X) if e not in used]] = -100
    return route(logits, k, np, normalised=True)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("T", "experts", "k"), [(1, 3, 1), (5, 6, 2), (40, 21, 8), (3, 4, 4)])
def test_the_routing_is_the_references(T: int, experts: int, k: int, normalised: bool, backend: CpuBackend) -> None:
    logits = random(T, experts)
    logits[0, :3] = 1  # equal ones
    got, expected = backend.route(logits, k, normalised=normalised), route(logits, k, np, normalised=normalised)
    for name, ours, theirs in zip(Routing._fields, got, expected, strict=True):
        if theirs is None:  # numbers for devices
            assert ours is None
            continue
        np.testing.assert_allclose(ours, theirs, rtol=3e-6, err_msg=name)


SPECS = [
    RouterSpec(sigmoid=True),
    RouterSpec(sigmoid=True, groups=4, chosen_groups=2, scale=2.5),
    RouterSpec(groups=3, chosen_groups=2),
    RouterSpec(groups=4, chosen_groups=2, group_best=1),
]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("spec", SPECS, ids=["sigmoid", "groups", "softmax in groups", "the best of groups"])
def test_scores_biases_and_groups_are_the_references(spec: RouterSpec, biased: bool, backend: CpuBackend) -> None:
    logits, bias = random(40, 24), random(24, seed=7) if biased else None
    given: dict[str, Any] = {"normalised": not biased, "spec": spec}
    weight = None if bias is None else Weight("b", bias)
    got, expected = backend.route(logits, 5, bias=weight, **given), route(logits, 5, np, bias=bias, **given)
    for name in ("experts", "rows", "tokens", "starts"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(got.weights, expected.weights, rtol=3e-6)


@pytest.mark.parametrize(("n", "silu"), [(1, False), (5, False), (70, False), (70, True)])
def test_a_gate_is_the_references(n: int, silu: bool, backend: CpuBackend) -> None:
    x, logits = random(3, 70), random(3, n + 2, seed=1)[:, :n]  # logits are columns of a wider array
    expected = gate(x, logits, np, np.empty_like(x), silu=silu)
    np.testing.assert_allclose(backend.gate(x, logits, silu=silu), expected, rtol=3e-6)


@pytest.mark.parametrize(("strided", "numbers"), [(True, 0), (False, 1), (True, 1), (False, 70), (True, 70)])
def test_products_of_rows_are_the_references(strided: bool, numbers: int, backend: CpuBackend) -> None:
    x, factor = random(5, 70), Weight("f", random(numbers, seed=1)) if numbers else None
    others = random(5, 3, 70, seed=2)[:, 1] if strided else None
    expected = multiply(x, others, None if factor is None else factor.data, np, np.empty_like(x))
    np.testing.assert_allclose(backend.multiply(x, others, factor=factor), expected, rtol=3e-6)


def test_factors_of_experts_are_the_references(backend: CpuBackend) -> None:
    logits, factors = random(40, 24), random(24, seed=7)
    ours = backend.route(logits, 5, normalised=True, factors=Weight("f", factors))
    np.testing.assert_allclose(ours.weights, route(logits, 5, np, normalised=True, factors=factors).weights, rtol=3e-6)


def test_logits_that_are_not_numbers_choose_an_expert_and_show_in_the_weights(backend: CpuBackend) -> None:
    logits = np.array([[1, np.nan, 2, 0], [np.nan] * 4, [np.inf, 1, 2, 3]], np.float32)
    routing = backend.route(logits, 2, normalised=True)
    assert ((routing.experts >= 0) & (routing.experts < 4)).all()
    assert routing.starts[-1] == 6
    assert routing.experts[0].tolist() == [2, 0]
    assert np.isnan(routing.weights[1:]).any(axis=1).all()


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "form", ["float32", "float16", "bfloat16", "int8", "int4", "int4 with offsets", "int4 with zero points"]
)
@pytest.mark.parametrize("tokens", [1, 7, 90])
def test_each_row_meets_its_expert_and_the_others_are_not_read(form: str, tokens: int, backend: CpuBackend) -> None:
    """The bits of the expert's product alone, by the same kernel; what an unused expert holds has no say."""
    form, _, offsets = form.partition(" with ")
    backend.loader = type(backend.loader)(form)
    matrices = [random(OUTPUTS, INPUTS, seed=10 + e) for e in range(X)]
    used = [0, 3, 4]
    weight = backend.loader.prepare_experts("experts", [[Held(matrix)] for matrix in matrices])
    if offsets:
        weight = Weight("experts", Experts(tuple(with_offsets(each, offsets) for each in weight.data.matrices)))
    for e in set(range(X)) - set(used):
        stored = weight.data.matrices[e]
        array = stored.scales if hasattr(stored, "scales") else stored
        array[...] = np.uint16(0x7FC0) if array.dtype == np.uint16 else np.nan
    routing = routing_to(used, tokens, 2)
    x = random(2 * tokens, INPUTS, seed=5)
    got = backend.linear_experts(x, weight, routing).copy()
    assert np.isfinite(got).all()
    for e, (first, stop) in enumerate(pairwise(routing.starts)):
        if first < stop:
            matrix = weight.data.matrices[e]
            exact = x[first:stop] @ expand(matrix).T
            np.testing.assert_allclose(got[first:stop], exact, rtol=0, atol=0.4 if form.startswith("int") else 1e-4)
            alone = backend.linear(x[first:stop], Weight("alone", matrix))
            if stop - first <= 16 and 2 * tokens <= 16 * X:  # both by the kernel for few rows
                np.testing.assert_array_equal(got[first:stop], alone)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_NL"])
@pytest.mark.parametrize("tokens", [1, 7, 90])
def test_experts_may_have_blocks(kind: str, tokens: int, backend: CpuBackend) -> None:
    matrices = tuple(random_blocks(np.random.default_rng(e), BLOCK_FORMATS[kind], OUTPUTS, 512) for e in range(X))
    routing, x = routing_to([0, 3, 4], tokens, 2), random(2 * tokens, 512, seed=5)
    got = backend.linear_experts(x, Weight("experts", Experts(matrices)), routing).copy()
    for e, (first, stop) in enumerate(pairwise(routing.starts)):
        alone = backend.linear(x[first:stop], Weight("alone", matrices[e])) if first < stop else x[:0, :OUTPUTS]
        np.testing.assert_array_equal(got[first:stop], alone)


@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize("tokens", [1, 7, 90])
def test_each_expert_adds_its_bias(form: str, tokens: int, backend: CpuBackend) -> None:
    backend.loader = type(backend.loader)(form)
    weight = backend.loader.prepare_experts("experts", [[Held(random(OUTPUTS, INPUTS, seed=e))] for e in range(X)])
    routing, x, biases = routing_to([0, 3, 4], tokens, 2), random(2 * tokens, INPUTS, seed=5), random(X, OUTPUTS)
    plain = backend.linear_experts(x, weight, routing).copy()
    for e, (first, stop) in enumerate(pairwise(routing.starts)):
        plain[first:stop] += biases[e]
    np.testing.assert_array_equal(backend.linear_experts(x, replace(weight, bias=biases), routing), plain)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("T", "k"), [(1, 1), (9, 3), (30, 2)])
def test_the_weighted_sum_is_the_references(T: int, k: int, residual: bool, backend: CpuBackend) -> None:
    routing, y, added = routing_to(list(range(X)), T, k), random(T * k, OUTPUTS), random(T, OUTPUTS, seed=1)
    given = added if residual else None
    expected = combine(y, routing, given, np, np.empty((T, OUTPUTS), np.float32))
    np.testing.assert_allclose(backend.combine(y, routing, given), expected, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(added, random(T, OUTPUTS, seed=1))
