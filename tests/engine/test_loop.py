"""The step loop: whatever is computed together, in whatever pieces and order, the tokens are the same."""

import time
from functools import cache

import numpy as np
import pytest

from minillm.backends import compiling
from minillm.errors import CacheFullError, ParameterError
from minillm.models.base import Model
from minillm.reference.philox import uniform
from minillm.runner.runner import Runner

from ..comparing import assert_same_draws, assert_same_tokens
from ..tiny import (
    VARIANTS,
    Result,
    generate,
    logits_of,
    loop_of,
    random_prompts,
    request_for,
    run,
    runner_of,
    tiny_model,
    tiny_runner,
)

PROMPTS = random_prompts(8, seed=1)
FIELDS = {"greedy": {}, "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.4}}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in ("pre-norm", "post-norm", "galactica") else pytest.mark.exhaustive)
        for name in VARIANTS
    ],
)
def runner(request) -> Runner:
    return tiny_runner(request.param, seed=2, pages=200, page_size=16)


def singly(runner: Runner, prompts: list[list[int]], *, max_new_tokens: int = 20) -> list[list[int]]:
    """Each prompt alone, in one piece, its whole context in one page: what everything else is held against."""
    return [lone(runner.model, tuple(prompt))[:max_new_tokens] for prompt in prompts]


@cache
def lone(model: Model, prompt: tuple[int, ...]) -> list[int]:
    """As many tokens as any test asks for."""
    return generate(runner_of(model, pages=8, page_size=64), [list(prompt)], max_new_tokens=30)[0]


def assert_agree(runner: Runner, prompts: list[list[int]], ours: list[list[int]], reference: list[list[int]]) -> None:
    for prompt, a, b in zip(prompts, ours, reference, strict=True):
        assert_same_tokens(a, b, lambda tokens, p=prompt: logits_of(runner, p + tokens)[-1])


# --- greedy: one result, many ways to it ------------------------------------------------------------------------------


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "naive"])
def test_a_ragged_batch_gives_what_each_prompt_gives_alone(runner: Runner, use_cache: bool) -> None:
    expected = singly(runner, PROMPTS, max_new_tokens=30)
    assert min(len(set(line)) for line in expected) >= 8
    assert_agree(runner, PROMPTS, generate(runner, PROMPTS, max_new_tokens=30, use_cache=use_cache), expected)
    assert runner.cache.free_pages == runner.cache.num_pages


def test_the_order_of_the_batch_makes_no_difference(runner: Runner) -> None:
    order = np.random.default_rng(0).permutation(len(PROMPTS))
    outputs = generate(runner, [PROMPTS[i] for i in order])
    expected = generate(runner, PROMPTS)
    assert_agree(runner, [PROMPTS[i] for i in order], outputs, [expected[i] for i in order])


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "naive"])
@pytest.mark.parametrize("chunk", [3, *(pytest.param(chunk, marks=pytest.mark.exhaustive) for chunk in (1, 7))])
@pytest.mark.slow
def test_a_prompt_in_chunks_gives_what_the_whole_gives(runner: Runner, chunk: int, use_cache: bool) -> None:
    outputs = generate(runner, PROMPTS, chunk=chunk, use_cache=use_cache, max_new_tokens=8)
    assert_agree(runner, PROMPTS, outputs, singly(runner, PROMPTS, max_new_tokens=8))


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "page_size", [1, 5, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (2, 16, 64, 100))]
)
def test_any_page_size_gives_what_one_page_gives(page_size: int) -> None:
    runner = tiny_runner(seed=2, pages=8 * 64, page_size=page_size)
    assert_agree(runner, PROMPTS, generate(runner, PROMPTS), singly(runner, PROMPTS))


@pytest.mark.parametrize("max_batch_size", [3, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (1, 8))])
def test_any_batch_size_gives_the_same(runner: Runner, max_batch_size: int) -> None:
    loop = loop_of(target=runner, max_batch_size=max_batch_size)
    outputs = [results[0].token_ids for results in run(loop, [request_for(p) for p in PROMPTS])]
    assert_agree(runner, PROMPTS, outputs, singly(runner, PROMPTS))


@pytest.mark.longer
def test_requests_may_come_while_others_run() -> None:
    runner = tiny_runner(seed=2, page_size=8)
    loop, tokens = loop_of(target=runner, chunk=5), {}
    waiting = [request_for(p) for p in PROMPTS]
    ids = []
    while waiting or loop.busy:
        if waiting:
            request = waiting.pop(0)
            ids.append(loop.add(request))
        for event in loop.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
    assert_agree(runner, PROMPTS, [tokens[i] for i in ids], singly(runner, PROMPTS))


def test_times_leave_out_the_compilation_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner(seed=2, pages=64)
    forward, calls = runner.forward, 0

    def compile_and_forward(*arguments, **options):
        nonlocal calls
        calls += 1
        with compiling():
            time.sleep(0.02)
        return forward(*arguments, **options)

    monkeypatch.setattr(runner, "forward", compile_and_forward)
    loop, began = loop_of(target=runner), time.perf_counter()
    run(loop, [request_for(PROMPTS[0], max_new_tokens=5)])
    stats, elapsed = loop.stats, time.perf_counter() - began
    assert stats.compile_seconds >= 0.02 * calls and calls >= 5
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0
    assert stats.prefill_seconds + stats.decode_seconds + stats.compile_seconds <= elapsed
    assert 0 < stats.decode_pass_seconds["target"] <= stats.decode_seconds


@pytest.mark.longer
def test_different_settings_run_side_by_side() -> None:
    runner = tiny_runner(seed=2, pages=400, page_size=4)
    kinds = [{}, {"num_beams": 3}, {"repetition_penalty": 1.5}, {"do_sample": True, "seed": 5}, {"use_cache": False}]
    requests = [request_for(p, **kinds[i % len(kinds)]) for i, p in enumerate(PROMPTS)]
    together = run(loop_of(target=runner, chunk=9), requests)
    alone = [run(loop_of(target=runner), [request])[0] for request in requests]
    assert [r[0].token_ids for r in together] == [r[0].token_ids for r in alone]
    assert runner.cache.free_pages == runner.cache.num_pages


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_log_probabilities_are_those_of_the_raw_logits(runner: Runner, fields: dict) -> None:
    requests = [request_for(p, logprobs=True, **fields) for p in PROMPTS]
    for prompt, (result,) in zip(PROMPTS, run(loop_of(target=runner), requests), strict=True):
        logits = logits_of(runner, prompt + result.token_ids)[len(prompt) - 1 : -1].astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        chosen = expected[np.arange(len(logits)), result.token_ids]
        np.testing.assert_allclose(result.log_probs, chosen, rtol=0, atol=1e-4)


# --- sampling ---------------------------------------------------------------------------------------------------------

SAMPLING = {"do_sample": True, "temperature": 1.2, "top_k": 0, "max_new_tokens": 25}


def sampled(runner: Runner, prompts: list[list[int]], **loop_options) -> list[list[int]]:
    requests = [request_for(p, seed=7 + len(p), **SAMPLING) for p in prompts]
    return [results[0].token_ids for results in run(loop_of(target=runner, **loop_options), requests)]


@pytest.mark.parametrize("options", [{}, {"chunk": 4}, {"max_batch_size": 3}], ids=str)
@pytest.mark.slow
def test_draws_depend_neither_on_the_batch_nor_on_its_order(runner: Runner, options: dict) -> None:
    prompts = PROMPTS[4::-1]
    together = sampled(runner, prompts, **options)
    assert len({tuple(line) for line in together}) == len(prompts)
    for prompt, ours in zip(prompts, together, strict=True):
        assert_same_draws(
            ours,
            sampled(runner, [prompt])[0],
            lambda tokens, p=prompt: logits_of(runner, p + tokens)[-1] / SAMPLING["temperature"],
            lambda i, p=prompt: float(uniform(7 + len(p), 0, len(p) + i)),
        )


@pytest.mark.longer
@pytest.mark.sampled(3)
def test_draws_follow_their_seed_and_the_index_of_the_sequence(runner: Runner) -> None:
    def samples(seed: int) -> list[list[int]]:
        request = request_for(PROMPTS[0], seed=seed, num_return_sequences=4, **SAMPLING)
        return [result.token_ids for result in run(loop_of(target=runner), [request])[0]]

    first = samples(3)
    assert samples(3) == first
    assert len({tuple(line) for line in [*first, *samples(4)]}) == 8
    assert first[0] == run(loop_of(target=runner), [request_for(PROMPTS[0], seed=3, **SAMPLING)])[0][0].token_ids


@pytest.mark.longer
def test_samples_that_end_early_leave_the_others_alone() -> None:
    runner = tiny_runner(seed=2)
    fields = {"seed": 3, "num_return_sequences": 6, **SAMPLING}
    [plain] = run(loop_of(target=runner), [request_for(PROMPTS[0], **fields)])
    ends = [plain[1].token_ids[4], plain[4].token_ids[9]]
    [cut] = run(loop_of(target=runner), [request_for(PROMPTS[0], eos_token_id=ends, **fields)])
    stops = [next((i + 1 for i, t in enumerate(r.token_ids) if t in ends), 25) for r in plain]
    assert len(set(stops)) > 2
    assert [r.token_ids for r in cut] == [r.token_ids[:stop] for r, stop in zip(plain, stops, strict=True)]


def test_several_samples_of_a_long_prompt_share_its_pages() -> None:
    runner = tiny_runner(pages=64, page_size=4)
    loop = loop_of(target=runner)
    request = request_for(list(range(3, 43)), num_return_sequences=5, seed=1, **(SAMPLING | {"max_new_tokens": 4}))
    loop.add(request)
    loop.step()
    loop.step()
    assert 64 - runner.cache.free_pages == 10 + 5  # the prompt's, and one more for each sequence


# --- ends, limits and memory ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_prompts_pass_through_a_small_batch_and_cache() -> None:
    model = tiny_model(
        seed=3, hidden_size=8, word_embed_proj_dim=8, num_attention_heads=1, ffn_dim=8, num_hidden_layers=1
    )
    runner = runner_of(model, pages=24, page_size=4)
    distinct = random_prompts(50, seed=5, longest=9)
    requests = [request_for(distinct[i % 50], max_new_tokens=3) for i in range(1000)]
    results = run(loop_of(target=runner, max_batch_size=8, chunk=32), requests)
    expected = singly(runner, distinct, max_new_tokens=3)
    assert_agree(runner, [r.prompt_ids for r in requests], [r[0].token_ids for r in results], expected * 20)
    assert runner.cache.free_pages == 24


@pytest.mark.longer
def test_an_end_token_ends_a_sequence_and_is_its_last() -> None:
    runner = tiny_runner(seed=2)
    plain = singly(runner, PROMPTS)
    ends = (plain[0][5], plain[1][3])
    requests = [request_for(p, eos_token_id=ends) for p in PROMPTS]
    for line, (result,) in zip(plain, run(loop_of(target=runner), requests), strict=True):
        stop = next((i + 1 for i, token in enumerate(line) if token in ends), None)
        assert result.token_ids == line[:stop]
        assert result.finish_reason == ("length" if stop is None else "stop")


def test_more_sequences_than_places_are_refused() -> None:
    loop = loop_of(target=tiny_runner(), max_batch_size=3)
    with pytest.raises(ParameterError, match="the request needs 4 sequences at once, and max_batch_size is 3"):
        run(loop, [request_for([5], num_beams=4)])


def test_a_request_that_the_cache_cannot_hold_alone_is_refused_and_others_run() -> None:
    runner = tiny_runner(pages=3, page_size=4)
    loop = loop_of(target=runner)
    with pytest.raises(CacheFullError, match="may need 4 pages of the K/V cache, which has 3"):
        run(loop, [request_for([5] * 4, max_new_tokens=9)])
    assert not loop.busy
    assert len(run(loop, [request_for([5] * 4, max_new_tokens=8)])[0][0].token_ids) == 8


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fields", [{"num_beams": 4}, {"num_beams": 4, "use_cache": False}], ids=str)
@pytest.mark.parametrize("prompt_length", [1, 7, 8, 9])
def test_the_pages_a_request_is_promised_are_enough(prompt_length: int, fields: dict) -> None:
    """Run with exactly as many as it may need: the last one is taken, and none is missing."""
    request = request_for(list(range(3, 3 + prompt_length)), max_new_tokens=10, **fields)
    plenty = loop_of(target=tiny_runner(seed=2, pages=99, page_size=4))
    needed = plenty._pages_needed(request, 4, request.max_new_tokens)
    exact = loop_of(target=tiny_runner(seed=2, pages=needed, page_size=4))
    assert run(exact, [request])[0][0].token_ids == run(plenty, [request])[0][0].token_ids


def test_an_aborted_request_leaves_nothing_behind() -> None:
    runner = tiny_runner(seed=2, page_size=4)
    loop = loop_of(target=runner, max_batch_size=2)
    requests = [request_for(p) for p in PROMPTS[:4]]
    ids = [loop.add(r) for r in requests]
    for _ in range(3):
        loop.step()
    for request_id in (ids[0], ids[3], ids[0], 999):  # running, waiting, gone already, never known
        loop.abort(request_id)
    assert not loop.knows(ids[0])
    assert [(event.request_id, event.finish_reason) for event in loop.take_events()] == [
        (ids[0], "abort"),
        (ids[3], "abort"),
    ]
    tokens: dict[int, list[int]] = {}
    while loop.busy:
        for event in loop.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
    assert set(tokens) == {ids[1], ids[2]}
    assert tokens[ids[2]] == singly(runner, [PROMPTS[2]])[0]
    assert runner.cache.free_pages == runner.cache.num_pages


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", range(4))
def test_a_strategy_that_raises_ends_its_request_and_leaves_the_others_alone(place: int) -> None:
    """Its rows are stale after the step, and so would be those of the ones that are asked after it."""

    def fails(history, logits, xp):
        if history.lengths[0] == len(PROMPTS[place]) + 3:
            raise RuntimeError("no more")
        return logits

    runner = tiny_runner(seed=2, pages=400, page_size=4)
    kinds = [{}, {"num_beams": 3}, {"repetition_penalty": 1.5}, {"penalty_alpha": 0.5, "top_k": 3}]
    requests = [request_for(p, **fields) for p, fields in zip(PROMPTS, kinds, strict=False)]
    expected = [run(loop_of(target=runner), [request])[0][0].token_ids for request in requests]
    requests[place] = request_for(PROMPTS[place], logits_processor=[fails])
    loop, errors = loop_of(target=runner), []
    long = request_for(list(range(3, 50)), max_new_tokens=1)
    run(loop, [long])
    run(loop, [long])  # the memory for results is as large as it gets: from here on it is used again
    tokens: dict[int, list[int]] = {loop.add(r): [] for r in requests}
    reasons = dict.fromkeys(tokens)
    while loop.busy:
        for event in loop.step():
            tokens[event.request_id] += event.token_ids
            reasons[event.request_id] = event.finish_reason
            if event.error is not None:
                errors.append(event.error)
                tokens[loop.add(long)] = []  # takes the memory that the rows lie in
    assert [str(error) for error in errors] == ["no more"]
    assert [*reasons.values()] == [*("error" if i == place else "length" for i in range(4)), "length"]
    expected[place] = singly(runner, [PROMPTS[place]], max_new_tokens=3)[0]
    assert [*tokens.values()][:4] == expected
    assert runner.cache.free_pages == runner.cache.num_pages


# --- the prefix cache -------------------------------------------------------------------------------------------------


def conversation(prefix_cache: bool, **fields) -> tuple[list[list[Result]], int, Runner]:
    """Three turns, each beginning with all that came before. Returns results, computed prompt tokens, the runner."""
    runner = tiny_runner(seed=2, pages=fields.pop("pages", 64), page_size=4)
    loop = loop_of(target=runner, prefix_cache=prefix_cache)
    line, turns = [], []
    for prompt in PROMPTS[:3]:
        line = line + prompt
        turns += run(loop, [request_for(line, max_new_tokens=5, **fields)])
        line += turns[-1][0].token_ids
    return turns, loop.stats.prefill_tokens, runner


@pytest.mark.parametrize("fields", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 3}], ids=str)
def test_the_prefix_cache_changes_the_work_and_not_the_tokens(fields: dict) -> None:
    plain, all_tokens, _ = conversation(False, **fields)
    kept, fewer, runner = conversation(True, **fields)
    assert [r[0].token_ids for r in kept] == [r[0].token_ids for r in plain]
    assert fewer < all_tokens - 10
    if not fields:  # the last token of an answer is never fed; it is computed with the next turn's prompt
        assert fewer == sum(map(len, PROMPTS[:3])) + 2
    assert runner.cache.free_pages == runner.cache.num_pages
    assert runner.cache.cached_pages > 0


@pytest.mark.parametrize("pages", [14, 16, 20])
def test_what_is_kept_gives_way_when_pages_run_out(pages: int) -> None:
    plain, _, _ = conversation(False)
    kept, _, _ = conversation(True, pages=pages)
    assert [r[0].token_ids for r in kept] == [r[0].token_ids for r in plain]


def test_a_kept_sequence_gives_way_to_the_one_that_continues_it() -> None:
    """One page in all: it is shared, has to be written to, and no second one is there for a copy."""
    runner = tiny_runner(seed=2, pages=1, page_size=64)
    loop = loop_of(target=runner, prefix_cache=True)
    first = run(loop, [request_for(PROMPTS[0], max_new_tokens=4)])[0][0].token_ids
    line = PROMPTS[0] + first + [9, 8]
    second = run(loop, [request_for(line, max_new_tokens=4)])[0][0].token_ids
    assert [first, second] == singly(runner, [PROMPTS[0], line], max_new_tokens=4)


def test_the_naive_way_computes_everything_each_time() -> None:
    counted = {}
    for use_cache in (True, False):
        loop = loop_of(target=tiny_runner())
        run(loop, [request_for([5] * 10, max_new_tokens=6, use_cache=use_cache)])
        counted[use_cache] = (loop.stats.prefill_tokens, loop.stats.decode_tokens, loop.stats.steps)
    assert counted == {True: (10, 5, 6), False: (10, 11 + 12 + 13 + 14 + 15, 6)}
