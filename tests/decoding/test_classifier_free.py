"""Classifier-free guidance against its formula on the model's logits, and in batches with others."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.errors import CacheFullError, ParameterError, PromptError
from minillm.reference.softmax import log_softmax

from .. import seq2seq
from ..cache.books import check_loop
from ..comparing import assert_same_results, assert_same_tokens
from ..reference.chi_square import p_value
from ..tiny import logits_of, loop_of, random_prompts, request_for, run, tiny_runner, write_checkpoint

PROMPTS = random_prompts(5, seed=4)
NEGATIVE = (9, 8, 7, 6, 5, 4, 3, 9, 8)
CASES: list[dict[str, Any]] = [
    {"guidance_scale": 1.5},
    {"guidance_scale": 3.0, "negative_prompt": NEGATIVE},
    {"guidance_scale": 0, "negative_prompt": NEGATIVE},
    {"guidance_scale": -1.0, "negative_prompt": (5,), "use_cache": False},
]


def formula(runner: Any, prompt: list[int], tokens: list[int], fields: dict[str, Any]) -> np.ndarray:
    """The scores of the token after `tokens`, in float64. -> [V]"""
    negative = [*fields.get("negative_prompt", prompt[-1:])]
    own, other = (
        log_softmax(logits_of(runner, [*ids, *tokens])[-1].astype(np.float64), np) for ids in (prompt, negative)
    )
    return fields["guidance_scale"] * own + (1 - fields["guidance_scale"]) * other


@pytest.mark.longer
def test_greedy_tokens_are_the_formulas() -> None:
    runner = tiny_runner(seed=2, pages=300)
    plain = [r[0].token_ids for r in run(loop_of(target=runner), [request_for(p, max_new_tokens=9) for p in PROMPTS])]
    requests = [(prompt, fields) for prompt in PROMPTS for fields in CASES]
    results = run(
        loop_of(target=runner, max_batch_size=9, chunk=7), [request_for(p, max_new_tokens=9, **f) for p, f in requests]
    )
    assert sum(result.token_ids not in plain for [result] in results) > 10
    for (prompt, fields), [result] in zip(requests, results, strict=True):

        def scores(tokens: list[int], prompt: list[int] = prompt, fields: dict[str, Any] = fields) -> np.ndarray:
            return formula(runner, prompt, tokens, fields)

        expected: list[int] = []
        while len(expected) < 9:
            expected.append(int(scores(expected).argmax()))
        assert_same_tokens(result.token_ids, expected, scores)
    assert runner.cache.free_pages == runner.cache.num_pages


@pytest.mark.longer
def test_samples_are_drawn_from_the_softmax_of_the_scores() -> None:
    runner, draws, fields = tiny_runner(seed=2, pages=900), 3000, CASES[1]
    sampling = {"do_sample": True, "top_k": 8, "num_return_sequences": 300, "max_new_tokens": 1, "temperature": 5.0}
    requests = [request_for([5, 6, 7], seed=seed, **sampling, **fields) for seed in range(draws // 300)]
    results = run(loop_of(target=runner, max_batch_size=600), requests)
    drawn = Counter(result.token_ids[0] for several in results for result in several)
    scores = formula(runner, [5, 6, 7], [], fields) / 5
    best = np.sort(np.argsort(-scores)[:8])
    weights = np.exp(scores[best] - scores.max())
    assert drawn.keys() <= set(best.tolist())
    assert p_value([drawn[token] for token in best.tolist()], draws * weights / weights.sum()) > 0.001


@pytest.mark.longer
def test_each_sample_and_each_beam_has_a_negative_text_of_its_own() -> None:
    runner, fields = tiny_runner(seed=2), CASES[1] | {"max_new_tokens": 8}
    sampled = {"do_sample": True, "seed": 1, "temperature": 5.0, "top_k": 2, "num_return_sequences": 4}
    samples, beams = (
        request_for(PROMPTS[0], **fields | more) for more in (sampled, {"num_beams": 3, "num_return_sequences": 3})
    )
    assert samples.strategy is request_for(PROMPTS[0], **fields | sampled | {"negative_prompt": (5,)}).strategy
    results = run(loop_of(target=runner), [samples, beams])
    assert len({tuple(result.token_ids) for result in results[0]}) > 2
    for kind, several in enumerate(results):
        for result in several:
            rows = [formula(runner, PROMPTS[0], result.token_ids[:i], fields) for i in range(8)]
            scores = [row[token] for row, token in zip(rows, result.token_ids, strict=True)]
            if kind:
                assert result.score == pytest.approx(sum(scores) / 8, abs=1e-3)
            else:
                assert all(score >= np.sort(row)[-2] - 1e-4 for score, row in zip(scores, rows, strict=True))


@pytest.mark.longer
def test_log_probabilities_are_those_after_the_prompt() -> None:
    runner = tiny_runner(seed=2)
    for beams in (1, 2):
        request = request_for(PROMPTS[0], logprobs=True, num_beams=beams, **CASES[1])
        [[result]] = run(loop_of(target=runner), [request])
        for i, (token, value) in enumerate(zip(result.token_ids, result.log_probs, strict=True)):
            own = log_softmax(logits_of(runner, PROMPTS[0] + result.token_ids[:i])[-1].astype(np.float64), np)
            assert value == pytest.approx(own[token], abs=1e-4)


# --- in an engine -----------------------------------------------------------------------------------------------------

LENGTH = {"max_new_tokens": 12, "eos_token_id": []}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"do_sample": True, "seed": 3, "num_return_sequences": 3, "top_p": 0.9},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams that sample": {"num_beams": 2, "do_sample": True, "seed": 5},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "top_logprobs": 2},
    "guided": {"guided_regex": "[a-z ]{3,30}"},
    "guided beams": {"guided_regex": "[a-z ]{3,30}", "num_beams": 2},
    "naive": {"use_cache": False},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return Engine(checkpoint, backend="numpy", max_batch_size=8)


def fields_of(kind: str) -> dict[str, Any]:
    ends = {"eos_token_id": 2} if "guided" in kind else {}
    return {"guidance_scale": 2.5, "negative_prompt": "once upon a time"} | LENGTH | ends | KINDS[kind]


@pytest.mark.parametrize("backend", [pytest.param("numpy", marks=pytest.mark.slow), "cpu"])
def test_a_request_gives_the_same_alone_and_beside_others_that_stay_the_same(checkpoint: Path, backend: str) -> None:
    engine = Engine(checkpoint, backend=backend, max_batch_size=9, cache_bytes=700_000)  # too small for all at once
    asked = [("a list of colors", fields_of(kind)) for kind in KINDS]
    asked += [("hello", LENGTH), ("the end", LENGTH | {"do_sample": True, "seed": 1, "num_return_sequences": 2})]
    alone = [engine.generate(prompt, **fields) for prompt, fields in asked]
    together = engine.run([engine.request(prompt, **fields) for prompt, fields in asked])
    for expected, result in zip(alone, together, strict=True):
        assert_same_results(result, expected)
    check_loop(engine._driver.loop)


@pytest.mark.longer
def test_many_samples_run_in_parts(engine: Engine) -> None:
    fields = fields_of("samples") | {"num_return_sequences": 11}
    many = engine.generate("hello", **fields)
    assert len({completion.text for completion in many.completions}) > 5
    few = engine.generate("hello", **fields | {"num_return_sequences": 3})
    for ours, expected in zip(many.completions[:3], few.completions, strict=True):
        assert ours.token_ids == expected.token_ids


def test_a_batch_of_one_sequence_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ParameterError, match="needs 2 sequences at once, and max_batch_size is 1: raise max_batch_siz"):
        Engine(checkpoint, max_batch_size=1).generate("hello", guidance_scale=2.0)


def test_the_longer_prompt_counts(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(checkpoint, backend="numpy")
    prompt, longer = [5, 6], [*range(3, 53)]
    answer = engine.generate(prompt, guidance_scale=2.0, negative_prompt=longer, max_new_tokens=30, eos_token_id=[])
    assert len(answer.token_ids) == 64 - len(longer)
    assert "14 fit after the prompt" in caplog.text
    with pytest.raises(PromptError, match="negative_prompt: the prompt has 64 tokens; the context holds 64"):
        engine.request(prompt, guidance_scale=2.0, negative_prompt=[5] * 64)


def test_the_memory_of_both_prompts_is_counted() -> None:
    negative, fields = tuple(range(3, 33)), {"guidance_scale": 2.0, "num_beams": 2, "max_new_tokens": 10}
    request = request_for([5, 6], negative_prompt=negative, **fields)
    needed = 2 * 3 + (7 + 2 * 3)  # pages of four: twelve positions twice; seven pages together, forty positions twice
    loop = loop_of(target=tiny_runner(pages=needed, page_size=4))
    assert loop._max_pages(request) == needed
    assert loop.room(request) == 10
    run(loop, [request])
    with pytest.raises(CacheFullError, match=f"may need {needed} pages of the K/V cache, which has {needed - 1}"):
        loop_of(target=tiny_runner(pages=needed - 1, page_size=4)).add(request)


@pytest.mark.longer
def test_preempted_requests_go_on_as_they_would_have() -> None:
    asked = [request_for(p, **CASES[1] | kind) for p in PROMPTS for kind in ({}, {"num_beams": 2})]
    loop = loop_of(target=tiny_runner(seed=2, pages=36, page_size=4), headroom=1)
    together = run(loop, asked)
    assert loop.stats.preemptions > 3
    roomy = loop_of(target=tiny_runner(seed=2, pages=300, page_size=4))
    for request, results in zip(asked, together, strict=True):
        assert [result.token_ids for result in results] == [r.token_ids for r in run(roomy, [request])[0]]


def test_an_echoed_prompt_has_its_own_scores(engine: Engine) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": True} | LENGTH
    guided = engine.generate("a list of colors", guidance_scale=2.0, negative_prompt="once upon a time", **asked)
    plain = engine.generate("a list of colors", **asked)
    assert guided.prompt_logprobs[1:] == pytest.approx(plain.prompt_logprobs[1:], abs=1e-5)


def test_what_it_does_not_go_with_is_refused(engine: Engine, tmp_path: Path) -> None:
    for fields, message in (
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, "with num_beam_groups=2: leave one of them"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "and penalty_alpha=0.5 each select a strategy"),
        ({"do_sample": True, "mirostat": 2}, "with mirostat=2"),
        ({"prompt_lookup_num_tokens": 3}, "and prompt_lookup_num_tokens=3 each select a strategy"),
    ):
        with pytest.raises(ParameterError, match=message):
            engine.request("hello", guidance_scale=1.5, **fields)  # type: ignore[arg-type]
    t5 = Engine(seq2seq.write_checkpoint(tmp_path))
    with pytest.raises(ParameterError, match=r"guidance_scale=1\.5 is not offered with an encoder-decoder: leave it"):
        t5.request([5], guidance_scale=1.5)
