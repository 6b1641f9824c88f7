"""The sampler against its definition by sorting, and both against exact distributions."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from minillm.errors import NumericalError
from minillm.reference.philox import uniform
from minillm.reference.sampling import sample
from minillm.reference.sampling_by_sorting import sample_by_sorting

from .chi_square import p_value

SAMPLERS = [sample, sample_by_sorting]
FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
EDGES = [2**-24, 1 - 2**-24]
"""The smallest and the largest uniform that Philox gives."""


def exact_distribution(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Probability of each token, from the definitions, one token at a time in Python floats."""
    weights = [math.exp(score / temperature) for score in logits]
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    if top_k:
        order = [token for token in order if weights[token] >= weights[order[min(top_k, len(order)) - 1]]]
    mass, total, nucleus = 0.0, sum(weights[token] for token in order), []
    for token in order:
        if mass >= top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    kept = [token for token in nucleus if weights[token] >= min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


SMALL = [2.0, 0.5, 1.5, -1.0, 0.5, 1.0, -3.0, 0.0]  # tokens 1 and 4 are equal
SETTINGS = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_k with a tie at the edge": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.15},
}


def counts(sampler: Callable, draws: int = 20_000, **settings: float) -> np.ndarray:
    u = uniform(2024, np.arange(draws) % 8, np.arange(draws) // 8)
    logits = np.broadcast_to(np.array(SMALL, np.float32), (draws, len(SMALL)))
    return np.bincount(sampler(logits, u, **(FILTERS | settings), xp=np), minlength=len(SMALL))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("top_k with a tie at the edge", "all") else [pytest.mark.exhaustive])
        for name in SETTINGS
    ],
)
@pytest.mark.slow
def test_tokens_are_drawn_with_their_exact_probabilities(sampler: Callable, name: str) -> None:
    settings = FILTERS | SETTINGS[name]
    observed = counts(sampler, **settings)
    assert p_value(observed, 20_000 * np.array(exact_distribution(SMALL, **settings))) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        {"top_p": 0.97},
        *(
            pytest.param(wrong, marks=pytest.mark.exhaustive)
            for wrong in ({"temperature": 1.1}, {"top_k": 7}, {"min_p": 0.02})
        ),
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_slightly_wrong_sampler_is_found_out(wrong: dict[str, float]) -> None:
    assert p_value(counts(sample, **wrong), 20_000 * np.array(exact_distribution(SMALL, **FILTERS))) < 1e-6


@pytest.mark.slow
def test_forgetting_to_renormalise_is_found_out() -> None:
    def sampler(logits: np.ndarray, uniforms: np.ndarray, *, top_p: float, **others: float) -> np.ndarray:
        drawn = sample(logits, uniforms, **(FILTERS | others))
        return np.where(np.isin(drawn, [0, 2, 5]), drawn, 5)  # what top-p drops goes to the last one kept

    expected = np.array(exact_distribution(SMALL, **(FILTERS | {"top_p": 0.75})))
    assert np.flatnonzero(expected).tolist() == [0, 2, 5]
    assert p_value(counts(sampler, top_p=0.75), 20_000 * expected) < 1e-6


def test_candidates_are_taken_in_order_of_score_and_then_of_id() -> None:
    logits = np.log(np.array([[0.2, 0.4, 0.2, 0.2]], np.float32))
    for u, token in [(1e-7, 1), (0.39, 1), (0.41, 0), (0.59, 0), (0.61, 2), (0.79, 2), (0.81, 3), (1 - 1e-7, 3)]:
        for sampler in SAMPLERS:
            assert sampler(logits, np.array([u]), **FILTERS, xp=np).tolist() == [token]


def shapes_of_logits(rng: np.random.Generator, V: int) -> dict[str, np.ndarray]:
    gaussian = rng.standard_normal(V) * rng.choice([0.1, 3.0, 30.0])
    shapes = {
        "gaussian": gaussian,
        "crowded at the top": rng.random(V) * 0.05,
        "equal scores": rng.integers(-3, 4, V),
        "one score": np.zeros(V),
        "a spike far above": np.where(np.arange(V) == V // 2, 500.0, gaussian),
        "neighbouring floats": 1 + rng.integers(0, 40, V) * 2.0**-23,  # some become equal when divided by 3
        "half forbidden": np.where(rng.random(V) < 0.5, -np.inf, gaussian),
        "all but one forbidden": np.full(V, -np.inf),
    }
    for row in shapes.values():
        row[rng.integers(V)] = row[np.isfinite(row)].max(initial=-1.0)
    return {name: row.astype(np.float32) for name, row in shapes.items()}


@pytest.mark.parametrize("V", [1, 17, 400, *(pytest.param(V, marks=pytest.mark.exhaustive) for V in (2, 3000))])
@pytest.mark.slow
def test_sampling_equals_its_definition(V: int) -> None:
    rng = np.random.default_rng(V)
    names, rows = zip(*shapes_of_logits(rng, V).items(), strict=True)
    logits = np.stack(rows)
    for temperature, top_k, top_p, min_p in itertools.product(
        [1.0, 0.3, 3.0], [0, 1, 40, V + 1], [1.0, 0.9, 1e-6], [0.0, 0.05, 1.0]
    ):
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        for u in [*EDGES, *rng.random(3)]:
            uniforms = np.full(len(logits), u)
            fast = sample(logits, uniforms, **settings, xp=np)
            plain = sample_by_sorting(logits, uniforms, **settings, xp=np)
            different = [names[i] for i in np.flatnonzero(fast != plain)]
            assert not different, (different, settings, u)


@pytest.mark.slow
def test_sampling_equals_its_definition_on_a_whole_vocabulary() -> None:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((40, 50_272)) * 3).astype(np.float32)
    u = uniform(3, np.arange(40), 0)
    for settings in ({"temperature": 0.7}, {"top_p": 0.95}, {"temperature": 0.8, "top_k": 50, "top_p": 0.9}):
        fast = sample(logits, u, **(FILTERS | settings), xp=np)
        assert fast.dtype == np.int64
        assert len(set(fast.tolist())) > 10
        np.testing.assert_array_equal(fast, sample_by_sorting(logits, u, **(FILTERS | settings), xp=np))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_logits_are_left_as_they_were(sampler: Callable) -> None:
    logits = np.array([SMALL], np.float32)
    sampler(logits, np.array([0.5]), temperature=1.0, top_k=3, top_p=0.5, min_p=0.5, xp=np)
    assert logits.tolist() == [SMALL]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("bad", [[0.0, np.nan], [-np.inf, -np.inf], [0.0, np.inf]])
def test_a_row_that_is_no_distribution_is_refused(sampler: Callable, bad: list[float]) -> None:
    logits = np.array([[0.0, 1.0], bad], np.float32)
    with pytest.raises(NumericalError, match="row 1 of the logits"):
        sampler(logits, np.array([0.5, 0.5]), **FILTERS, xp=np)
