"""A mixture of experts against a loop over tokens in float64; its routing, its costs, and what is counted of it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.backends.observe import CountingBackend, put_between
from minillm.backends.weights import Weight
from minillm.batch import TokenSequence
from minillm.layers.experts import ExpertMLP
from minillm.layers.mlp import GatedMLP
from minillm.measure import accounting
from minillm.measure.accounting.memory import parts_held
from minillm.measure.accounting.storage import Storage
from minillm.models import published_config
from minillm.reference.experts import (
    RouterSpec,
    Routing,
    combine,
    combine_cost,
    expected_experts,
    linear_experts_cost,
    route,
    route_cost,
)

from ..families import CONFIGS
from ..tiny import model_of, runner_of

T, E, F, X = 7, 12, 10, 6


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Prepared:
    """A matrix in a tensor's place."""

    dtype = "float32"

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape

    def load(self) -> np.ndarray:
        return self.values

    def read_into(self, out: np.ndarray) -> None:
        out[...] = self.values


def test_a_bias_counts_in_the_choice_alone_and_groups_by_their_best_two() -> None:
    """DeepSeek-V3's router, token by token: the loop of its paper."""
    logits, bias = random(T, 12), random(12, seed=1)
    spec = RouterSpec(sigmoid=True, groups=4, chosen_groups=2, scale=2.5)
    routing = route(logits, 3, np, normalised=True, bias=bias, spec=spec)
    for t in range(T):
        scores = 1 / (1 + np.exp(-logits[t].astype(np.float64)))
        ranked = (scores + bias).tolist()
        groups = sorted(range(4), key=lambda g: -sum(sorted(ranked[3 * g : 3 * g + 3])[1:]))[:2]
        experts = sorted((e for g in groups for e in range(3 * g, 3 * g + 3)), key=lambda e: -ranked[e])[:3]
        assert routing.experts[t].tolist() == experts
        np.testing.assert_allclose(routing.weights[t], 2.5 * scores[experts] / scores[experts].sum(), rtol=1e-5)


def test_a_chosen_experts_weight_has_its_factor_once_the_weights_are_normalised() -> None:
    logits = np.log(np.array([[1, 2, 5, 8], [8, 1, 1, 2]], np.float32))
    routing = route(logits, 2, np, normalised=True, factors=np.array([1, 10, 100, 1000], np.float32))
    assert routing.experts.tolist() == [[3, 2], [0, 3]]
    np.testing.assert_allclose(routing.weights, [[8000 / 13, 500 / 13], [0.8, 200]], rtol=1e-6)


def test_a_shared_expert_computes_every_token() -> None:
    """Times the sigmoid of a product of its own, where it has one; the rest is the chosen experts' sum."""
    x, residual, backend = random(T, E), random(T, E, seed=1), NumpyBackend()
    arrays = random(X, E, seed=2), random(X, 2 * F, E, seed=3), random(X, E, F, seed=4)
    each: list[Any] = [[[Prepared(matrix)] for matrix in matrices] for matrices in arrays[1:]]
    experts = [backend.loader.prepare_experts("e", matrices) for matrices in each]
    plain = ExpertMLP(Weight("r", arrays[0], role="router"), *experts, 2, True, "silu")
    gate_up, down, factor = random(2 * 5, E, seed=5), random(E, 5, seed=6), random(1, E, seed=7)
    shared = GatedMLP(Weight("g", gate_up), Weight("d", down), "silu")
    gated, up = np.split(x @ gate_up.T, 2, axis=1)
    own = (gated / (1 + np.exp(-gated)) * up) @ down.T
    for weight, factors in ((None, 1), (Weight("f", factor), 1 / (1 + np.exp(-(x @ factor.T))))):
        layer = replace(plain, shared=shared, shared_gate=weight)
        sums = plain(backend, x, residual).copy() + factors * own
        np.testing.assert_allclose(layer(backend, x, residual), sums, rtol=0, atol=1e-4)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("k", [1, 2, X])
def test_a_mixture_is_the_weighted_sum_of_each_tokens_experts(k: int, normalised: bool, biased: bool) -> None:
    x, residual = random(T, E), random(T, E, seed=1)
    router, gate_up, down = random(X, E, seed=2), random(X, 2 * F, E, seed=3), random(X, E, F, seed=4)
    gate_up_bias, down_bias = random(X, 2 * F, seed=5) * biased, random(X, E, seed=6) * biased
    backend = NumpyBackend()

    def weight(name: str, *parts: np.ndarray) -> Weight:
        each: Any = [[[Prepared(array)] for array in arrays] for arrays in parts]
        return backend.loader.prepare_experts(name, *each[: 1 + biased])

    layer = ExpertMLP(
        Weight("r", router, role="router"),
        weight("g", gate_up, gate_up_bias),
        weight("d", down, down_bias),
        k,
        normalised,
        "silu",
    )
    expected = residual.astype(np.float64)
    for t, row in enumerate(x.astype(np.float64)):
        p = np.exp(row @ router.T)
        p /= p.sum()
        chosen = np.argsort(-p)[:k]
        share = p[chosen] / (p[chosen].sum() if normalised else 1)
        for e, weight_of in zip(chosen, share, strict=True):
            gate, up = np.split(gate_up[e] @ row + gate_up_bias[e], 2)
            expected[t] += weight_of * (down[e] @ (gate / (1 + np.exp(-gate)) * up) + down_bias[e])
    np.testing.assert_allclose(layer(backend, x, residual), expected, rtol=1e-5, atol=2e-5)


def test_rows_are_sorted_by_expert_and_the_first_of_equal_experts_is_chosen() -> None:
    logits = np.array([[1, 3, 3, 0], [2, 2, 2, 2], [0, 0, 1, 5]], np.float32)
    routing = route(logits, 2, np, normalised=True)
    assert routing.experts.tolist() == [[1, 2], [0, 1], [3, 2]]
    assert routing.starts.tolist() == [0, 1, 3, 5, 6]  # expert 0: token 1; 1: tokens 0, 1; 2: tokens 0, 2; 3: token 2
    assert routing.tokens.tolist() == [1, 0, 1, 0, 2, 2]
    assert routing.rows.tolist() == [[1, 3], [0, 2], [5, 4]]
    assert routing.used == 4
    np.testing.assert_allclose(routing.weights.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(routing.weights[0], [0.5, 0.5], rtol=1e-6)


def test_routing_of_random_logits_gives_every_choice_a_row_of_its_expert() -> None:
    routing = route(random(50, X), 3, np, normalised=False)
    assert sorted(routing.rows.ravel().tolist()) == list(range(150))
    owner = np.repeat(np.arange(X), np.diff(routing.starts))
    np.testing.assert_array_equal(owner[routing.rows], routing.experts)
    np.testing.assert_array_equal(routing.tokens[routing.rows], np.arange(50)[:, None].repeat(3, axis=1))


@pytest.mark.parametrize("residual", [True, False])
def test_combining_makes_the_stated_flops_and_moves_the_named_arrays(residual: bool) -> None:
    routing, y, added = route(random(T, X), 2, np, normalised=True), random(2 * T, E), random(T, E, seed=1)
    out = combine(y, routing, added if residual else None, np, np.empty((T, E), np.float32))
    cost = combine_cost(T, E, 2, residual=residual)
    assert cost.flops == T * E * (2 + 2 + residual)  # two products, two sums, the residual's
    assert cost.bytes_read == sum(a.nbytes for a in (y, routing.weights, routing.rows)) + residual * added.nbytes
    assert cost.bytes_written == out.nbytes


def test_routing_moves_the_named_arrays() -> None:
    logits = random(T, X)
    routing = route(logits, 2, np, normalised=True)
    cost = route_cost(T, X, 2, normalised=True)
    assert cost.bytes_read == logits.nbytes
    assert cost.bytes_written == sum(array.nbytes for array in routing if array is not None)
    assert cost.flops == 4 * T * X + 2 * T * 2


def test_factors_of_experts_are_read_and_multiplied() -> None:
    plain, times = (route_cost(3, 8, 2, normalised=True, by_factors=by_factors) for by_factors in (False, True))
    assert times.flops - plain.flops == 6
    assert times.bytes_read - plain.bytes_read == 4 * 8


def test_the_expected_number_of_experts_is_that_of_random_choices() -> None:
    rng, tokens, k, experts = np.random.default_rng(0), 5, 3, 16
    found = [len({e for _ in range(tokens) for e in rng.permutation(experts)[:k]}) for _ in range(4000)]
    assert np.mean(found) == pytest.approx(expected_experts(tokens, experts, k), abs=0.1)
    assert expected_experts(1, experts, k) == pytest.approx(k)


class Watching(CountingBackend):
    """Also keeps the routing of each layer."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.routings: dict[int | None, Routing] = {}

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        super().observe(operation, weight, result, **arguments)
        if operation == "route":
            self.routings[self.layer] = result


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
def test_counted_are_the_bytes_of_the_experts_that_were_used(weights: str) -> None:
    """Of the chosen experts alone, whatever their number, and not of the others."""
    raw = CONFIGS["mixtral"]["two of six, window"] | {"num_local_experts": 16}
    backend = NumpyBackend(weights=weights)
    model: Any = model_of(raw, backend=backend)
    runner = runner_of(model, backend=backend)
    with put_between(runner, Watching(runner.backend)) as counted:
        runner.forward([TokenSequence([5, 6, 7])], [3])
    for i, routing in counted.routings.items():
        used = len(np.unique(routing.experts))
        assert 2 <= used <= 6
        mlp = model.layers[i].mlp
        matrices = sum(weight.data.matrices[0].nbytes for weight in (mlp.gate_up, mlp.down))
        rows = 4 * 6 * (32 + 40)  # of both products
        assert counted.costs["linear_experts", i].bytes_read == used * matrices + rows
        assert counted.costs["linear_experts", i].flops == 2 * 6 * (32 * 80 + 40 * 32)
    assert linear_experts_cost(6, 32, 80, 100, 2.5).bytes_read == 4 * 6 * 32 + 250


@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [("mixtral-8x7b", 46.7e9, 12.9e9), ("qwen3-30b-a3b", 30.5e9, 3.3e9), ("olmoe-1b-7b", 6.9e9, 1.28e9)],
)
def test_active_parameters_are_those_published(shape: str, total: float, active: float) -> None:
    """arXiv 2401.04088 ("47B", "13B"), 2505.09388 (30.5B, 3.3B), 2409.02060 (6.9B, 1.3B)."""
    config = published_config(shape)
    assert accounting.parameter_count(config) == pytest.approx(total, rel=0.01)
    assert accounting.active_parameter_count(config) == pytest.approx(active, rel=0.02)
    dense = published_config("mistral-7b-v0.1")
    assert accounting.active_parameter_count(dense) == accounting.parameter_count(dense)
    experts = [part for part in parts_held(config, Storage()) if part.active < part.parameters]
    assert {part.name for part in experts} == {"mlp.gate_up", "mlp.down"}
