"""Each way of sampling against its exact distribution, by chi-square, through the strategy that the settings choose."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minillm.backends.token_sampler import TokenSampler
from minillm.decoding.resolving import strategy_for
from minillm.decoding.strategy import Rows
from minillm.reference import philox
from minillm.reference.philox import Keys, uniform
from minillm.reference.sampling_by_sorting import sample_by_sorting

from ..reference.chi_square import p_value
from ..tiny import request_for

DRAWS = 20_000
LOGITS = [2.0, 0.5, 1.5, -1.0, 0.5, 1.0, -3.0, 0.0]  # tokens 1 and 4 are equal
Distribution = list[float]
"""Probability of each token"""


def softmax(logits: list[float]) -> Distribution:
    total = math.fsum(map(math.exp, logits))
    return [math.exp(x) / total for x in logits]


def only(kept: set[int], p: Distribution) -> Distribution:
    mass = math.fsum(p[token] for token in kept)
    return [p[token] / mass if token in kept else 0.0 for token in range(len(p))]


def entropy(p: Distribution) -> float:
    return -math.fsum(x * math.log(x) for x in p if x)


def typical(p: Distribution, mass: float) -> Distribution:
    h, kept, reached = entropy(p), set(), 0.0
    distances = {token: abs(-math.log(x) - h) for token, x in enumerate(p) if x}
    for distance in sorted(set(distances.values())):
        if reached >= mass:
            break
        new = {token for token in distances if distances[token] == distance}
        kept |= new
        reached += sum(p[token] for token in new)
    return only(kept, p)


def at_least(p: Distribution, floor: float) -> Distribution:
    return only({token for token, x in enumerate(p) if x >= floor or x == max(p)}, p)


def top_h(p: Distribution, share: float) -> Distribution:
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    kept, spent = {order[0]}, 0.0
    for token in order:
        spent -= p[token] * math.log(p[token])
        if spent <= share * entropy(p):
            kept.add(token)
    return only(kept, p)


def top_n_sigma(p: Distribution, n: float) -> Distribution:
    logs = [math.log(x) for x in p]
    sigma = float(np.std(logs))
    return only({token for token, x in enumerate(logs) if x >= max(logs) - n * sigma}, p)


P = softmax(LOGITS)
WARM = softmax([x / 1.5 for x in LOGITS])
CASES: dict[str, tuple[dict[str, float], Distribution]] = {
    "typical": ({"typical_p": 0.3}, typical(P, 0.3)),
    "typical, nearly all": ({"typical_p": 0.97}, typical(P, 0.97)),
    "epsilon": ({"epsilon_cutoff": 0.06}, at_least(P, 0.06)),
    "epsilon above all": ({"epsilon_cutoff": 0.9}, at_least(P, 0.9)),
    "eta": ({"eta_cutoff": 0.2}, at_least(P, min(0.2, math.sqrt(0.2) * math.exp(-entropy(P))))),
    "top-h": ({"top_h": 0.7}, top_h(P, 0.7)),
    "top-h of next to nothing": ({"top_h": 0.01}, top_h(P, 0.01)),
    "top-n-sigma": ({"top_n_sigma": 1.0}, top_n_sigma(P, 1.0)),
    "warm top-n-sigma": ({"top_n_sigma": 1.0, "temperature": 1.5}, only({0, 2, 5}, WARM)),
    "top-k before typical": ({"top_k": 4, "typical_p": 0.6}, typical(only({0, 1, 2, 4, 5}, P), 0.6)),
    "mirostat": ({"mirostat": 2, "mirostat_tau": 1.6}, at_least(P, 2**-3.2)),
    "warm mirostat": ({"mirostat": 2, "mirostat_tau": 1.6, "temperature": 1.5}, at_least(WARM, 2**-3.2)),
}


class PlainDraws(TokenSampler):
    """Draws by the definition, which is quicker for many rows of few tokens."""

    def sample(self, logits: Any, keys: Keys, **filters: Any) -> Any:
        alike = {name: np.unique(values).item() for name, values in filters.items()}  # of rows with the same settings
        return sample_by_sorting(logits, keys.uniforms(), **alike, xp=np)


def counts(**fields: float) -> np.ndarray:
    """First tokens of many continuations of one prompt."""
    if "mirostat" not in fields:
        fields = {"top_k": 0} | fields
    request = request_for(
        [0], vocab_size=8, max_new_tokens=1, do_sample=True, seed=7, num_return_sequences=DRAWS, **fields
    )
    strategy = strategy_for(request.settings)
    state, feeds = strategy.begin(request)
    state.feeds = len(feeds)
    strategy.step(PlainDraws(), [state], Rows(np.array([LOGITS], np.float32), [0, 1]))
    return np.bincount([continuation.token_ids[0] for continuation in state.results], minlength=8)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_tokens_are_drawn_with_their_exact_probabilities(name: str) -> None:
    fields, expected = CASES[name]
    possible = sum(p > 0 for p in expected)
    observed = counts(**fields)
    assert (observed > 0).sum() == possible < 8
    assert possible == 1 or p_value(observed, DRAWS * np.array(expected)) > 1e-3


WRONG: dict[str, Callable[[], Distribution]] = {
    "typical": lambda: at_least(P, sorted(P)[-2]),  # the best in place of the most typical
    "epsilon": lambda: at_least(P, 0.1),
    "eta": lambda: at_least(P, 0.2),  # without the entropy
    "top-h": lambda: top_h(P, 0.8),
    "top-n-sigma": lambda: top_n_sigma(P, 1.3),
    "mirostat": lambda: at_least(P, 2**-1.6),  # mu = tau
    "warm mirostat": lambda: at_least(P, 2**-3.2),  # the temperature forgotten
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.slow
def test_a_slightly_wrong_rule_is_found_out(name: str) -> None:
    assert p_value(counts(**CASES[name][0]), DRAWS * np.array(WRONG[name]())) < 1e-6


XTC = {"xtc_probability": 0.4, "xtc_threshold": 0.12}


def with_xtc(often: float) -> Distribution:
    """P, and in a share of the draws without the two best of the tokens from 0.12 on: 0 and 2, but not 5."""
    assert sorted(token for token, p in enumerate(P) if p >= 0.12) == [0, 2, 5]
    left = only({*range(8)} - {0, 2}, P)
    return [(1 - often) * p + often * other for p, other in zip(P, left, strict=True)]


@pytest.mark.slow
def test_xtc_removes_the_best_tokens_as_often_as_it_should() -> None:
    observed = counts(**XTC)
    assert p_value(observed, DRAWS * np.array(with_xtc(0.4))) > 1e-3
    assert p_value(observed, DRAWS * np.array(with_xtc(0.5))) < 1e-6


def test_the_draws_of_xtc_leave_those_of_the_tokens_as_they_are() -> None:
    """Where it removes nothing, the token is the one that comes without XTC; elsewhere none of the removed."""

    def tokens(**fields: float) -> list[int]:
        request = request_for([0], vocab_size=8, do_sample=True, top_k=0, seed=5, num_return_sequences=400, **fields)
        strategy = strategy_for(request.settings)
        state, _ = strategy.begin(request)
        strategy.step(TokenSampler(), [state], Rows(np.array([LOGITS], np.float32), [0, 1]))
        return [continuation.token_ids[0] for continuation in state.results]

    removed = uniform(5, np.arange(400), 1, philox.XTC) <= 0.4
    for token, plain, without in zip(tokens(**XTC), tokens(), removed, strict=True):
        assert token not in (0, 2) if without else token == plain
    assert 120 < removed.sum() < 200


def test_each_draw_is_the_same_alone() -> None:
    """A filter that masks the row leaves the uniform number and its meaning as they are."""
    fields = {"typical_p": 0.9, "top_p": 0.95, "do_sample": True, "max_new_tokens": 1, "vocab_size": 8}
    rng = np.random.default_rng(0)
    requests = [request_for([1] * (1 + i % 3), seed=i, **fields) for i in range(40)]
    logits = rng.normal(0, 2, (40, 8)).astype(np.float32)
    strategy = strategy_for(requests[0].settings)
    assert all(strategy_for(request.settings) is strategy for request in requests)
    together = [strategy.begin(request)[0] for request in requests]
    strategy.step(TokenSampler(), together, Rows(logits.copy(), list(range(41))))
    for i, request in enumerate(requests):
        alone = strategy.begin(request)[0]
        strategy.step(TokenSampler(), [alone], Rows(logits[i : i + 1].copy(), [0, 1]))
        assert alone.results[0].token_ids == together[i].results[0].token_ids
