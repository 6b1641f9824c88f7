"""Beam search against exhaustive search; the comparison with transformers is in test_beam_transformers.py."""

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest

from minillm.backends.token_sampler import TokenSampler
from minillm.decoding.beam import BeamSearch
from minillm.decoding.resolving import resolve
from minillm.decoding.settings import GenerationConfig
from minillm.decoding.strategy import Rows
from minillm.errors import ParameterError

from ..tiny import Result, generate, logits_of, loop_of, random_prompts, request_for, run, runner_of, tiny_model

V, LENGTH = 6, 3
PROMPTS = [[1], [3, 2], [4, 4, 0, 1]]


@pytest.fixture(scope="module")
def runner():
    return runner_of(tiny_model(seed=5, vocab_size=V), pages=9000, page_size=4)


def search(runner, prompts: list[list[int]], **fields: Any) -> list[list[Result]]:
    requests = [request_for(p, vocab_size=runner.model.config.vocab_size, **fields) for p in prompts]
    return run(loop_of(target=runner, max_batch_size=2000), requests)


@cache
def log_probability(runner, prompt: tuple[int, ...], line: tuple[int, ...]) -> float:
    logits = logits_of(runner, [*prompt, *line])[len(prompt) - 1 : -1].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return float(log_probs[np.arange(len(line)), line].sum())


def everything(runner, prompt: list[int], eos: tuple[int, ...], penalty: float) -> list[tuple[float, list[int]]]:
    """Every line that may be generated with its score, best first."""
    scored = []
    for length in range(1, LENGTH + 1):
        for line in itertools.product(range(V), repeat=length):
            ended = line[-1] in eos
            if (ended or length == LENGTH) and not set(line[:-1]) & set(eos):
                scored.append((log_probability(runner, tuple(prompt), line) / length**penalty, list(line)))
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("eos", [(), (2,), (0, 3)])
@pytest.mark.slow
def test_enough_beams_find_the_best_of_everything(runner, eos: tuple[int, ...], penalty: float) -> None:
    fields: dict[str, Any] = {"length_penalty": penalty, "early_stopping": "never"}
    fields |= {"eos_token_id": eos} if eos else {}
    for prompt in PROMPTS:
        expected = everything(runner, prompt, eos, penalty)[:3]
        [results] = search(
            runner, [prompt], num_beams=V ** (LENGTH - 1), num_return_sequences=3, max_new_tokens=LENGTH, **fields
        )
        assert [r.token_ids for r in results] == [line for _, line in expected]
        np.testing.assert_allclose([r.score for r in results], [score for score, _ in expected], rtol=1e-5, atol=1e-4)


def test_scores_come_best_first_and_are_those_of_their_tokens(runner) -> None:
    [results] = search(runner, [[3, 1]], num_beams=4, num_return_sequences=4, max_new_tokens=9, length_penalty=0.5)
    scores = [r.score for r in results]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(r.token_ids) for r in results}) == 4
    expected = [log_probability(runner, (3, 1), tuple(r.token_ids)) / 9**0.5 for r in results]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_beams_find_likelier_lines_than_greedy_search() -> None:
    runner, gains = runner_of(tiny_model(seed=2), pages=400, page_size=4), []
    for prompt in random_prompts(8, seed=2):
        [greedy] = generate(runner, [prompt], max_new_tokens=10)
        [[best]] = search(runner, [prompt], num_beams=6, max_new_tokens=10)
        lines = (tuple(best.token_ids), tuple(greedy))
        gains.append(np.subtract(*(log_probability(runner, tuple(prompt), line) for line in lines)))
    assert np.mean(gains) > 0.5
    assert np.min(gains) > -0.1  # a beam may be cut that would have won


@pytest.mark.parametrize("fields", [{}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("options", [{"chunk": 3}, {"max_batch_size": 4}, {}], ids=str)
@pytest.mark.slow
def test_a_ragged_batch_cached_or_naive_gives_what_each_prompt_gives_alone(options: dict, fields: dict) -> None:
    runner = runner_of(tiny_model(seed=2), pages=600, page_size=4)
    prompts = random_prompts(5, seed=3)
    fields = {"num_beams": 4, "max_new_tokens": 10, "eos_token_id": [20, 40, 60], "logprobs": True, **fields}
    alone = [search(runner, [prompt], **fields)[0][0] for prompt in prompts]
    for use_cache in (True, False):
        requests = [request_for(p, use_cache=use_cache, **fields) for p in prompts]
        for (ours,), expected in zip(run(loop_of(target=runner, **options), requests), alone, strict=True):
            assert ours.token_ids == expected.token_ids
            assert ours.finish_reason == expected.finish_reason
            np.testing.assert_allclose([ours.score, *ours.log_probs], [expected.score, *expected.log_probs], atol=1e-4)
    assert runner.cache.free_pages == 600


def test_log_probabilities_are_the_models_own_whatever_a_penalty_does() -> None:
    runner, prompt = runner_of(tiny_model(seed=2)), [5, 6, 7]
    [[best]] = search(runner, [prompt], num_beams=3, repetition_penalty=1.5, logprobs=True, max_new_tokens=8)
    expected = log_probability(runner, tuple(prompt), tuple(best.token_ids))
    np.testing.assert_allclose(sum(best.log_probs), expected, atol=1e-4)
    assert abs(best.score * 8 - expected) > 0.1


def test_beams_are_fed_best_first_and_of_equal_ones_the_smaller_index() -> None:
    request = request_for([1], vocab_size=6, num_beams=3)
    strategy = BeamSearch(request.settings)
    state, _ = strategy.begin(request)

    def fed(*logits: list[float]) -> list[tuple[int, int]]:
        rows = Rows(np.array(logits, np.float32), range(len(logits) + 1))
        [feeds] = strategy.step(TokenSampler(), [state], rows)
        state.feeds = len(feeds)
        return [(feed.parent, feed.tokens[0]) for feed in feeds]

    assert fed([0.0, 5.0, 1.0, 4.0, 4.0, 0.0]) == [(0, 1), (0, 3), (0, 4)]
    likely, flat = [0.0, 0.0, 9.0, 0.0, 9.0, 0.0], [0.0] * 6
    assert fed(flat, likely, likely) == [(1, 2), (1, 4), (2, 2)]


def test_top_logprobs_are_refused_by_name() -> None:
    config = GenerationConfig(num_beams=2, top_logprobs=3)
    with pytest.raises(ParameterError, match="top_logprobs is not supported with num_beams > 1"):
        BeamSearch(resolve(config, {}, vocab_size=9, eos_token_id=2))


EXTREME = [-50.0, -10.0, -5.0, 10.0, 50.0]


@pytest.mark.parametrize("groups", [{}, {"num_beam_groups": 2, "diversity_penalty": 0.5}], ids=["beams", "diverse"])
@pytest.mark.parametrize("eos", [{}, {"eos_token_id": [3, 9, 20, 40, 60]}], ids=["no end", "ends"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", EXTREME)
@pytest.mark.slow
def test_there_are_results_whatever_the_length_penalty(
    penalty: float, early_stopping: Any, eos: dict, groups: dict
) -> None:
    """A score of many tokens is far below -1e9 with -10, and no float32 with -50."""
    fields = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 40, "logprobs": True, **eos, **groups}
    fields |= {"length_penalty": penalty, "early_stopping": early_stopping}
    [results] = search(runner_of(tiny_model(seed=2)), [[5, 6, 7]], **fields)
    scores = [result.score for result in results]
    assert scores == sorted(scores, reverse=True)
    if not groups:  # the handicap is a part of the score
        expected = [sum(r.log_probs) / float(len(r.token_ids)) ** penalty for r in results]
        np.testing.assert_allclose(scores, expected, rtol=1e-5)
    assert all(result.finish_reason in ("stop", "length") for result in results)


def test_scores_stay_within_float64() -> None:
    for penalty in (-50.0, 50.0):
        settings = request_for([1], vocab_size=6, num_beams=2, length_penalty=penalty).settings
        scores = [BeamSearch(settings).score(total, 10**7) for total in (0.0, -1e-30, -1.0)]
        assert scores == sorted(scores, reverse=True)
        assert not np.isnan(scores).any()


@pytest.mark.parametrize("temperature", [1e-9, 1e-30, 1e30])
def test_sampled_beams_have_results_at_every_temperature(temperature: float) -> None:
    fields = {"do_sample": True, "num_beams": 4, "num_return_sequences": 4, "seed": 1, "max_new_tokens": 8}
    [results] = search(runner_of(tiny_model(seed=2)), [[5, 6, 7]], temperature=temperature, **fields)
    assert [len(result.token_ids) for result in results] == [8] * 4


def test_there_are_no_more_results_than_lines(runner) -> None:
    """One token of 6: beams that copy the first one are no results."""
    [results] = search(runner, [[1]], num_beams=9, num_return_sequences=9, max_new_tokens=1)
    found = [tuple(result.token_ids) for result in results if result.token_ids]
    assert sorted(found) == [(token,) for token in range(V)]
