"""Draft model, prompt lookup and lookahead: the same tokens, or the same distribution, in fewer passes."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.batch import TokenSequence
from minillm.decoding.acceptance import expected_tokens
from minillm.decoding.resolving import resolve, strategy_for
from minillm.decoding.settings import GenerationConfig
from minillm.decoding.speculative import AcceptOrResample, SpeculativeDecoding, look_up
from minillm.decoding.strategy import Request, Strategy
from minillm.engine.loop import StepLoop
from minillm.runner.runner import Runner

from ..comparing import assert_same_tokens
from ..reference.chi_square import p_value
from ..tiny import generate, logits_of, loop_of, random_prompts, run, runner_of, tiny_model

PROMPTS = random_prompts(40, seed=4)
WAYS: dict[str, dict[str, Any]] = {
    "draft": {"models": ("draft",)},
    "draft-2": {"models": ("draft",), "num_assistant_tokens": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3},
    "lookahead": {"lookahead_window": 4},
    "lookahead-2": {"lookahead_window": 3, "lookahead_ngram_size": 2, "lookahead_guesses": 2},
    "lookahead-5": {"lookahead_window": 2, "lookahead_ngram_size": 5},
}


def request_for(prompt: list[int], *, models: tuple[str, ...] = (), vocab_size: int = 96, **fields: Any) -> Request:
    config = GenerationConfig(**{"max_new_tokens": 20} | fields)
    settings = replace(resolve(config, {}, vocab_size=vocab_size, eos_token_id=None, models=models), max_length=None)
    return Request(list(prompt), settings, strategy_for(settings))


def target_model(page_size: int = 8, **fields: Any) -> Runner:
    """A model whose tokens repeat now and then, so that guesses are right and wrong."""
    model = tiny_model(seed=2, **fields)
    model.embedding.positions.data[:] *= 0.3
    return runner_of(model, pages=600, page_size=page_size)


def draft_model(noise: float = 0.02, page_size: int = 8, **fields: Any) -> Runner:
    """The target with noise in its token embedding: it often guesses right."""
    runner = target_model(page_size, **fields)
    table = runner.model.embedding.tokens.data
    table += noise * np.random.default_rng(0).standard_normal(table.shape, np.float32)
    return runner


def loop_for(target: Runner, **options: Any) -> StepLoop:
    return loop_of(target=target, draft=draft_model(), **options)


def assert_all_free(loop: StepLoop) -> None:
    assert all(runner.cache.free_pages == runner.cache.num_pages for runner in loop.runners.values())


# --- greedy -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_40_ragged_prompts_give_the_greedy_tokens(way: dict[str, Any]) -> None:
    target = target_model()
    loop = loop_for(target, chunk=40)
    results = run(loop, [request_for(p, **way) for p in PROMPTS])
    for prompt, expected, (result,) in zip(PROMPTS, generate(target, PROMPTS), results, strict=True):
        assert_same_tokens(result.token_ids, expected, lambda tokens, p=prompt: logits_of(target, p + tokens)[-1])
    counts = loop.stats.speculation
    assert 0.05 < counts.acceptance_rate < 0.95  # right and wrong guesses both occurred
    assert counts.tokens_per_step > 1.02
    assert counts.tokens == 40 * 19  # all but those that the prompts gave
    assert_all_free(loop)


FIELDS: dict[str, dict[str, Any]] = {
    "naive": {"use_cache": False},
    "penalised": {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "ends": {"eos_token_id": (20, 30, 40, 50), "min_new_tokens": 3},
    "short": {"max_new_tokens": 2},
    "one": {"max_new_tokens": 1},
    "full": {"max_new_tokens": 44},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("way", ["draft", "prompt lookup", "lookahead"])
@pytest.mark.slow
def test_whatever_else_is_asked_the_tokens_are_those_without_guesses(way: str, fields: dict[str, Any]) -> None:
    """44 tokens after a prompt of 20 fill the context of 64."""
    target = target_model()
    loop = loop_for(target)
    guessed = run(loop, [request_for(p, **WAYS[way], **fields) for p in PROMPTS[:10]])
    plain = run(loop_of(target=target), [request_for(p, **fields) for p in PROMPTS[:10]])
    for prompt, (ours,), (reference,) in zip(PROMPTS, guessed, plain, strict=False):
        scores = lambda tokens, p=prompt: logits_of(target, p + tokens)[-1]  # noqa: E731
        assert_same_tokens(ours.token_ids, reference.token_ids, scores)
        assert ours.finish_reason == reference.finish_reason
    assert_all_free(loop)


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["draft", "prompt lookup", "lookahead"])
def test_log_probabilities_are_the_targets_own(way: str) -> None:
    target = target_model()
    fields = {"logprobs": True, "repetition_penalty": 1.2}
    guessed = run(loop_for(target), [request_for(p, **WAYS[way], **fields) for p in PROMPTS[:8]])
    plain = run(loop_of(target=target), [request_for(p, **fields) for p in PROMPTS[:8]])
    for (ours,), (reference,) in zip(guessed, plain, strict=True):
        np.testing.assert_allclose(ours.log_probs, reference.log_probs, atol=1e-4)


@pytest.mark.longer
def test_what_is_kept_of_a_finished_sequence_ends_before_the_tree_of_its_last_pass() -> None:
    """An end token may come while guesses lie behind it, at places in the cache that are not theirs."""
    target = target_model()
    loop = loop_of(target=target, prefix_cache=True)
    for prompt in PROMPTS[:8]:
        request = request_for(prompt, lookahead_window=4, eos_token_id=tuple(range(20, 60)), max_new_tokens=30)
        [[result]] = run(loop, [request])
        line = prompt + result.token_ids
        again = TokenSequence([*line, 0])
        found = target.cache.match(again)
        assert found >= len(prompt)
        expected = logits_of(target, again.token_ids)[-1]
        np.testing.assert_allclose(target.prefill(again).logits[0], expected, rtol=0, atol=1e-5)
        target.cache.free(again)


# --- sampling ---------------------------------------------------------------------------------------------------------

SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 0}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["prompt lookup", "lookahead"])
def test_guesses_that_are_certain_leave_each_draw_as_it_is(way: str) -> None:
    target = target_model()
    fields = SAMPLING | {"temperature": 0.6, "seed": 3, "num_return_sequences": 3}
    loop = loop_for(target)
    guessed = run(loop, [request_for(p, **WAYS[way], **fields) for p in PROMPTS[:10]])
    plain = run(loop_of(target=target), [request_for(p, **fields) for p in PROMPTS[:10]])
    assert [[r.token_ids for r in results] for results in guessed] == [[r.token_ids for r in rs] for rs in plain]
    assert loop.stats.speculation.accepted > 20
    assert_all_free(loop)


SMALL = {
    "vocab_size": 6, "hidden_size": 8, "word_embed_proj_dim": 8, "num_attention_heads": 1, "ffn_dim": 8,
    "num_hidden_layers": 1,
}  # fmt: skip
DRAWS, FEW, DEPTH = 6_000, 4_000, 3
PROMPT = [0, 2, 5, 3, 0, 4, 4, 5, 1, 0, 5, 0, 3, 0, 1, 2, 2, 2]


def exact(runner: Runner, filtered: Callable[[np.ndarray], np.ndarray]) -> dict[tuple[int, ...], float]:
    """The probability of each continuation of DEPTH tokens."""
    after: dict[tuple[int, ...], np.ndarray] = {}
    probabilities = {}
    for tokens in product(range(SMALL["vocab_size"]), repeat=DEPTH):
        probability = 1.0
        for i, token in enumerate(tokens):
            if tokens[:i] not in after:
                after[tokens[:i]] = filtered(logits_of(runner, PROMPT + list(tokens[:i]))[-1].astype(np.float64))
            probability *= after[tokens[:i]][token]
        probabilities[tokens] = probability
    return probabilities


def softmax_of(logits: np.ndarray) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / SAMPLING["temperature"])
    return weights / weights.sum()


def without_the_least(logits: np.ndarray) -> np.ndarray:
    """top_k = 4."""
    return softmax_of(np.where(logits < np.sort(logits)[-4], -np.inf, logits))


def goodness(
    way: dict[str, Any],
    filtered: Callable[[np.ndarray], np.ndarray] = softmax_of,
    rule: Any = None,
    draws: int = DRAWS,
    **fields: Any,
) -> tuple[float, float]:
    """p of some thousand draws of three tokens against the exact distribution, and the acceptance rate.

    The first token comes with the prompt; the others are guessed at.
    """
    target, draft = target_model(**SMALL), draft_model(0.3, **SMALL)
    loop = loop_of(target=target, draft=draft, max_batch_size=500)
    fields = SAMPLING | {"max_new_tokens": DEPTH, "num_return_sequences": 500} | fields
    requests = [request_for(PROMPT, vocab_size=6, seed=seed, **fields, **way) for seed in range(draws // 500)]
    strategy: Strategy = strategy_for(requests[0].settings)
    if rule is not None:
        strategy = SpeculativeDecoding(requests[0].settings)
        strategy.choice = rule(requests[0].settings)
    lines = Counter(tuple(result.token_ids) for results in run(loop, requests, strategy) for result in results)
    expected = {line: draws * p for line, p in exact(target, filtered).items()}
    likely = [line for line, count in expected.items() if count >= 5]
    rare = set(expected) - set(likely)
    assert not any(lines[line] for line in rare if expected[line] == 0)
    observed = [*(lines[line] for line in likely), sum(lines[line] for line in rare)]
    cells = [*(expected[line] for line in likely), sum(expected[line] for line in rare)]
    return p_value(observed, cells), loop.stats.speculation.acceptance_rate


DRAFTED = {"models": ("draft",), "num_assistant_tokens": 2}
LOOKED_UP = {"prompt_lookup_num_tokens": 2}


@pytest.mark.slow
@pytest.mark.parametrize("way", [DRAFTED, LOOKED_UP], ids=["draft", "prompt lookup"])
def test_samples_have_the_targets_distribution(way: dict[str, Any]) -> None:
    p, acceptance = goodness(way)
    assert p > 0.001
    assert 0.15 < acceptance < 0.9


@pytest.mark.slow
def test_filters_change_the_drafts_distribution_and_the_targets_alike() -> None:
    p, acceptance = goodness(DRAFTED, without_the_least, top_k=4)
    assert p > 0.001
    assert 0.1 < acceptance < 0.95


class AcceptsTheLikely(AcceptOrResample):
    """Wrong: takes a drafted token with probability p instead of p / q."""

    def accepts(self, p: Any, q: Any, drafted: Any, uniforms: Any) -> Any:
        return uniforms < p[np.arange(len(drafted)), drafted]


class AcceptsAll(AcceptOrResample):
    """Wrong: that is the draft's distribution."""

    def accepts(self, p: Any, q: Any, drafted: Any, uniforms: Any) -> Any:
        return uniforms > 0


@pytest.mark.slow
@pytest.mark.parametrize("rule", [AcceptsTheLikely, AcceptsAll])
def test_a_wrong_acceptance_rule_fails_the_same_test(rule: type) -> None:
    assert goodness(DRAFTED, rule=rule, draws=FEW)[0] < 1e-6


@pytest.mark.slow
def test_draws_of_a_draft_do_not_depend_on_the_batch() -> None:
    target, fields = target_model(), SAMPLING | {"seed": 3} | WAYS["draft"]
    together = run(loop_for(target, chunk=30), [request_for(p, **fields) for p in PROMPTS[:12]])
    alone = [run(loop_for(target), [request_for(p, **fields)])[0] for p in PROMPTS[:12]]
    assert [r.token_ids for (r,) in together] == [r.token_ids for (r,) in alone]


# --- how much it helps ------------------------------------------------------------------------------------------------


def test_looking_up() -> None:
    assert look_up([1, 2, 3, 9, 2, 3], 2, 3) == [9, 2, 3]
    assert look_up([1, 2, 3, 9, 2, 3], 2, 1) == [9]
    assert look_up([7, 3, 5, 2, 3, 9, 2, 3], 3, 1) == [9]  # "2 3" comes before the earlier "3"
    assert look_up([1, 2, 3], 3, 5) == look_up([5], 3, 5) == look_up([1, 1], 3, 0) == []
    assert look_up([4, 4, 4], 2, 5) == [4]


def test_the_formula() -> None:
    assert expected_tokens(1, 3) == 4
    assert expected_tokens(0, 3) == 1
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)


def test_a_draft_that_is_always_right_gives_as_many_tokens_as_the_formula_says() -> None:
    target = target_model()
    loop = loop_of(target=target, draft=target_model())
    run(loop, [request_for(p, max_new_tokens=25, **WAYS["draft"]) for p in PROMPTS[:5]])
    assert loop.stats.speculation.acceptance_rate == 1
    assert loop.stats.speculation.tokens_per_step == loop.stats.speculation.predicted_tokens_per_step == 6


REPEATED = "Count from 3 to 20: 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20.\n"
LISTS = ["A list of colors: red,", "A list of animals: cat,", "A list of fruits:", "Colors: blue, green,"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "prompts", "least"),
    [
        (
            {"prompt_lookup_num_tokens": 10},
            [REPEATED + "Count from 3 to 20:", REPEATED + "Count from 3 to 20: 3,"],
            1.5,
        ),
        ({"lookahead_window": 15, "lookahead_ngram_size": 2}, LISTS, 1.3),
        ({"lookahead_window": 15}, ["Count from 3 to 30:", "Count from 40 to 60:"], 1.3),
    ],
    ids=["prompt lookup", "lookahead", "counting"],
)
def test_the_demo_model_needs_fewer_passes(fields: dict[str, Any], prompts: list[str], least: float) -> None:
    with Engine(max_batch_size=4) as engine:
        plain = engine.generate(prompts, max_new_tokens=60)
        guessed = engine.generate(prompts, max_new_tokens=60, **fields)
        assert [g.token_ids for g in guessed] == [g.token_ids for g in plain]
        assert engine.stats.speculation.tokens_per_step > least


@pytest.mark.longer
def test_looking_back_finds_the_longest_match_whatever_its_limit() -> None:
    """Against looking at every length and every place; a limit of a million costs no more than the text is long."""
    draw, long = random.Random(5), 0
    for _ in range(500):
        size = draw.randint(1, 3)
        line = draw.choices(range(size), k=draw.randint(1, 40))
        line = line + line[: draw.randint(0, 40)] + line * draw.randint(0, 1)
        longest, count = draw.choice([1, 2, 16, 17, 25, 10**6]), draw.randint(0, 4)
        matches = [
            (n, end)
            for n in range(1, min(longest, len(line) - 1) + 1)
            for end in range(n, len(line))
            if line[end - n : end] == line[-n:]
        ]
        n, end = max(matches, key=lambda match: (match[0], -match[1]), default=(0, len(line)))
        assert look_up(line, longest, count) == line[end : end + count]
        long += n > 17
    assert long > 50
