"""Contrastive decoding against the paper's formula, from the two models' logits."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from minillm.runner.runner import Runner

from ..comparing import assert_same_tokens
from ..reference.chi_square import p_value
from ..tiny import logits_of, loop_of, random_prompts, run, tiny_runner
from .test_guessing import request_for

PROMPTS = random_prompts(6, seed=4)


def models() -> dict[str, Runner]:
    return {"target": tiny_runner(seed=2, pages=300), "amateur": tiny_runner(seed=3, pages=300)}


def log_probs(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def formula(runners: dict[str, Runner], tokens: list[int], alpha: float = 0.1, temperature: float = 1.0) -> np.ndarray:
    """log p_expert - log p_amateur where p_expert >= alpha max p_expert, else -inf."""
    expert = log_probs(logits_of(runners["target"], tokens)[-1])
    amateur = log_probs(logits_of(runners["amateur"], tokens)[-1] / temperature)
    return np.where(np.exp(expert) >= alpha * np.exp(expert).max(), expert - amateur, -np.inf)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alpha", "temperature", "use_cache"), [(0.1, 1.0, True), (0.5, 0.5, True), (0.001, 2.0, True), (0.1, 1.0, False)]
)
def test_greedy_tokens_are_the_formulas(alpha: float, temperature: float, use_cache: bool) -> None:
    runners = models()
    fields: dict[str, Any] = {"contrastive_alpha": alpha, "amateur_temperature": temperature, "use_cache": use_cache}
    requests = [request_for(p, models=("amateur",), **fields) for p in PROMPTS]
    results = run(loop_of(chunk=9, **runners), requests)
    plain = run(loop_of(target=runners["target"]), [request_for(p) for p in PROMPTS])
    assert sum(a[0].token_ids != b[0].token_ids for a, b in zip(results, plain, strict=True)) > 3
    for prompt, (result,) in zip(PROMPTS, results, strict=True):

        def scores(tokens: list[int], prompt: list[int] = prompt) -> np.ndarray:
            return formula(runners, prompt + tokens, alpha, temperature)

        expected: list[int] = []
        while len(expected) < 20:
            expected.append(int(scores(expected).argmax()))
        assert_same_tokens(result.token_ids, expected, scores)
    assert all(runner.cache.free_pages == runner.cache.num_pages for runner in runners.values())


@pytest.mark.longer
def test_samples_are_drawn_from_the_softmax_of_the_scores() -> None:
    runners, draws = models(), 3000
    fields = {"do_sample": True, "top_k": 0, "num_return_sequences": 300, "max_new_tokens": 1, "temperature": 2.0}
    requests = [request_for([5, 6, 7], models=("amateur",), seed=seed, **fields) for seed in range(draws // 300)]
    results = run(loop_of(max_batch_size=300, **runners), requests)
    drawn = Counter(result.token_ids[0] for several in results for result in several)
    scores = formula(runners, [5, 6, 7]) / 2
    weights = np.exp(scores - scores.max())
    assert np.count_nonzero(weights) > 3
    expected = draws * weights / weights.sum()
    assert p_value([drawn[token] for token in range(len(expected))], expected) > 0.001


def test_log_probabilities_are_the_experts() -> None:
    runners = models()
    [[result]] = run(loop_of(**runners), [request_for(PROMPTS[0], models=("amateur",), logprobs=True)])
    for i, (token, value) in enumerate(zip(result.token_ids, result.log_probs, strict=True)):
        expert = log_probs(logits_of(runners["target"], PROMPTS[0] + result.token_ids[:i])[-1])
        assert value == pytest.approx(expert[token], abs=1e-4)
