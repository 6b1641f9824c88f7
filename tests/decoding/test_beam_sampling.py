"""Beam search that samples: its draws against exact sampling without replacement, and the search around them."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minillm.backends.token_sampler import TokenSampler
from minillm.decoding.beam import BeamSearch
from minillm.decoding.filters import build_filters
from minillm.decoding.strategy import Request, Rows
from minillm.errors import NumericalError
from minillm.reference.philox import BEAMS, uniform
from minillm.reference.sampling_by_sorting import keep_min_p, keep_top_p
from minillm.reference.sampling_without_replacement import sample_without_replacement

from ..reference.chi_square import p_value
from ..tiny import loop_of, random_prompts, request_for, run, runner_of, tiny_model

CHOOSER = TokenSampler()
DRAWS = 5_000


def exact(scores: np.ndarray, n: int) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of n draws without replacement."""
    weights = np.exp(scores.astype(np.float64))
    table = {}
    for ids in itertools.permutations(np.flatnonzero(weights).tolist(), n):
        left = weights.sum() - np.cumsum([0.0, *weights[list(ids[:-1])]])
        table[ids] = float(np.prod(weights[list(ids)] / left))
    assert math.isclose(sum(table.values()), 1.0)
    return table


def p_of(drawn: list[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    places = {ids: i for i, ids in enumerate(expected)}
    counts = np.bincount([places[ids] for ids in drawn], minlength=len(expected))
    return p_value(counts, np.asarray(list(expected.values())) * len(drawn))


# The draws -----------------------------------------------------------------------------------------------------------

SCORES = {
    "peaked": np.asarray([1.0, -0.5, 0.5, 0.4, -np.inf, -1.0], np.float32),
    "one bucket": np.asarray([0.001, 0.0, 0.0, 0.002, 0.001], np.float32),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_draws_without_replacement_follow_the_exact_distribution(name: str) -> None:
    scores = SCORES[name]
    uniforms = uniform(np.arange(DRAWS)[:, None], np.arange(3), 7, BEAMS)
    drawn = [tuple(sample_without_replacement(scores, u, np).tolist()) for u in uniforms]
    assert p_of(drawn, exact(scores, 3)) > 0.001


@pytest.mark.slow
def test_the_same_test_tells_draws_that_share_a_uniform_number() -> None:
    scores = SCORES["peaked"]
    uniforms = np.repeat(uniform(np.arange(DRAWS)[:, None], 0, 7, BEAMS), 3, axis=1)
    drawn = [tuple(sample_without_replacement(scores, u, np).tolist()) for u in uniforms]
    assert p_of(drawn, exact(scores, 3)) < 1e-6


def test_what_weighs_nothing_follows_best_first() -> None:
    scores = np.asarray([-np.inf, -300.0, 0.0, -200.0, -300.0, -np.inf, 0.5], np.float32)
    drawn = sample_without_replacement(scores, np.full(7, 0.3), np).tolist()
    assert set(drawn[:2]) == {2, 6}
    assert drawn[2:] == [3, 1, 4, 0, 5]


@pytest.mark.parametrize("bad", [np.full(3, -np.inf), np.asarray([0.0, np.nan]), np.asarray([0.0, np.inf])])
def test_a_row_that_is_no_distribution_is_refused(bad: np.ndarray) -> None:
    with pytest.raises(NumericalError):
        sample_without_replacement(bad.astype(np.float32), np.asarray([0.5]), np)


# The search ----------------------------------------------------------------------------------------------------------


def settings_for(**fields: Any) -> Any:
    return request_for([1, 2], vocab_size=6, **fields).settings


@pytest.mark.slow  # 3,000 steps of a search
def test_a_step_draws_from_the_sums_of_all_beams() -> None:
    """3,000 requests that differ by their seed stand at the same two beams: how often is each pair chosen next?"""
    logits = np.asarray([[1.0, 0.0, 2.0], [0.5, 0.5, -1.0]], np.float32)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    sums = np.asarray([-0.4, -1.0], np.float32)
    expected: dict[tuple[int, ...], float] = {}
    for ids, probability in exact((log_probs / 2 + sums[:, None]).reshape(-1), 4).items():
        pair = tuple(sorted(ids, key=lambda i: -(log_probs / 2 + sums[:, None]).reshape(-1)[i])[:2])
        expected[pair] = expected.get(pair, 0.0) + probability
    request = request_for([1], vocab_size=3, num_beams=2, do_sample=True, temperature=2.0, top_k=0, seed=0)
    search, drawn = BeamSearch(request.settings), []
    for seed in range(3_000):
        request = Request([1], replace(request.settings, seed=seed), search)
        state = search.first_beams(request)
        state.beams = [beam for beam in (request.continuation(0), request.continuation(1)) if not beam.push(0)]
        state.scores, state.feeds = sums.copy(), 2
        [feeds] = search.step(CHOOSER, [state], Rows(logits.copy(), [0, 1, 2]))
        drawn.append(tuple(3 * feed.parent + feed.tokens[0] for feed in feeds))  # type: ignore[operator]
    assert p_of(drawn, expected) > 0.001


def test_filters_leave_more_tokens_than_can_end_a_sequence() -> None:
    """As transformers does: one more than there are end-of-sequence tokens, and 2 where there are none."""
    logits = np.asarray([[9.0, 0.0, -1.0, -2.0, -3.0, -4.0]], np.float32)
    for fields in ({"top_k": 1}, {"top_p": 0.01, "top_k": 0}, {"min_p": 1.0, "top_k": 0}):
        for eos, num_beams, left in (([], 2, 2), ([5], 2, 2), ([1, 2, 3], 2, 4), ([1, 2, 3], 1, 1)):
            scores = logits.copy()
            for keep in build_filters(settings_for(do_sample=True, num_beams=num_beams, eos_token_id=eos, **fields)):
                scores = keep(None, scores, np)  # type: ignore[arg-type]
            assert np.isfinite(scores).sum() == left


def test_the_least_number_is_no_number_for_those_who_keep_more() -> None:
    row = np.asarray([[1.0, 0.9, 0.8, -5.0, -6.0]], np.float32)
    assert np.isfinite(keep_top_p(row.copy(), 0.95, np, 2)).sum() == 3
    assert np.isfinite(keep_min_p(row.copy(), 0.5, np, 2)).sum() == 3


@pytest.fixture(scope="module")
def runner():
    return runner_of(tiny_model(seed=2), pages=800, page_size=4)


FIELDS = {"do_sample": True, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 10, "eos_token_id": [20, 40]}


@pytest.mark.slow
def test_the_seed_decides_whatever_else_is_in_the_batch(runner) -> None:
    prompts = random_prompts(5, seed=4)
    requests = lambda: [request_for(p, seed=i, logprobs=True, **FIELDS) for i, p in enumerate(prompts)]  # noqa: E731
    alone = [run(loop_of(target=runner), [request])[0] for request in requests()]
    together = run(loop_of(target=runner, chunk=3), requests()[::-1])[::-1]
    for ours, expected in zip(together, alone, strict=True):
        assert [r.token_ids for r in ours] == [r.token_ids for r in expected]
        np.testing.assert_allclose([r.score for r in ours], [r.score for r in expected], atol=1e-4)
    other = run(loop_of(target=runner), [request_for(p, seed=9, **FIELDS) for p in prompts])
    assert [r[0].token_ids for r in other] != [r[0].token_ids for r in alone]
    assert runner.cache.free_pages == runner.cache.num_pages


@pytest.mark.longer
def test_the_smallest_temperature_is_beam_search(runner) -> None:
    """The likeliest candidate weighs everything, and once it is drawn nothing weighs anything: best first."""
    for prompt in random_prompts(4, seed=6):
        fields = {"num_beams": 3, "max_new_tokens": 10, "eos_token_id": [20, 40]}
        [[plain]] = run(loop_of(target=runner), [request_for(prompt, **fields)])
        cold_fields = {"do_sample": True, "temperature": 1e-4, "top_k": 0, **fields}
        [[cold]] = run(loop_of(target=runner), [request_for(prompt, **cold_fields)])
        assert cold.token_ids == plain.token_ids
        np.testing.assert_allclose(cold.score * 1e-4, plain.score, rtol=1e-5)
