"""Requests that begin with the same tokens: computed once, also by requests that run at the same time."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.batch import TokenSequence, common_prefix
from minillm.cache import PrefixCache
from minillm.decoding.resolving import resolve, strategy_for
from minillm.decoding.settings import GenerationConfig
from minillm.decoding.strategy import Request
from minillm.engine.loop import StepLoop
from minillm.errors import NumericalError
from minillm.runner.runner import Runner

from ..cache.books import check_contents, check_loop, nodes_of
from ..tiny import NO_REPEATS, Result, loop_of, request_for, run, runner_of, tiny_model

COMMON = np.random.default_rng(0).integers(3, 96, 300).tolist()
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.2, **NO_REPEATS},
    "sampling": {"do_sample": True, "seed": 3, "num_return_sequences": 3},
    "mirostat": {"do_sample": True, "seed": 3, "mirostat": 2},
    "beams": {"num_beams": 3},
    "diverse": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.4, "top_k": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "lookahead": {"lookahead_window": 3},
    "draft": {"models": ("draft",)},
    "amateur": {"models": ("amateur",)},
    "naive": {"use_cache": False},
}


def runner(pages: int = 200, page_size: int = 16, *, seed: int = 2, **fields: Any) -> Runner:
    fields = {"max_position_embeddings": 512} | fields
    return runner_of(tiny_model(seed=seed, **fields), pages=pages, page_size=page_size)


def made(prompt: Sequence[int], *, models: tuple[str, ...] = (), **fields: Any) -> Request:
    """A request, also for one of the models beside the target."""
    if not models:
        return request_for(prompt, **fields)
    config = GenerationConfig(max_new_tokens=fields.pop("max_new_tokens"), **fields)
    settings = resolve(config, {}, vocab_size=96, eos_token_id=None, models=models)
    return Request(list(prompt), settings, strategy_for(settings))


def finish(loop: StepLoop, ids: dict[int, list[Result]], check: Callable[[], None] = lambda: None) -> None:
    """Run to the end, checking the books after every step."""
    while loop.busy:
        for event in loop.step():
            if event.error is not None:
                assert event.request_id not in ids, event.error
                continue
            if event.request_id in ids:
                result = ids[event.request_id][event.index]
                result.token_ids += event.token_ids
                result.finish_reason = event.finish_reason
        check_loop(loop)
        check()


def added(loop: StepLoop, request: Request) -> tuple[int, list[Result]]:
    results = [Result() for _ in range(request.settings.num_return_sequences)]
    return loop.add(request), results


# --- what is computed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_size", "chunk"),
    [
        pytest.param(size, chunk, marks=() if (size, chunk) in ((16, 512), (4, 100)) else pytest.mark.exhaustive)
        for size in (4, 16, 64, 512)
        for chunk in (512, 100)
    ],
)
def test_a_beginning_that_eight_new_prompts_have_in_common_is_computed_once(page_size: int, chunk: int) -> None:
    requests = [request_for([*COMMON, *range(10 + i, 30 + i)], max_new_tokens=1) for i in range(8)]
    loop = loop_of(target=runner(page_size=page_size), prefix_cache=True, chunk=chunk)
    ids = dict(added(loop, request) for request in requests)
    finish(loop, ids)
    rest = 300 + 8 * 20
    if chunk == 512:
        assert loop.stats.prefill_tokens == rest
    assert rest <= loop.stats.prefill_tokens <= rest + 7 * 16
    assert (loop.stats.prompt_tokens, loop.stats.cached_tokens) == (8 * 320, 8 * 320 - loop.stats.prefill_tokens)
    plain = run(loop_of(target=runner(page_size=page_size)), requests)
    assert [r[0].token_ids for r in ids.values()] == [r[0].token_ids for r in plain]


@pytest.mark.longer
@pytest.mark.parametrize("page_size", [4, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (1, 16))])
def test_one_after_the_other_each_prompt_computes_what_no_earlier_one_had(page_size: int) -> None:
    """The closed form: of each prompt, what is beyond its longest common prefix with any text before it."""
    rng, loop = random.Random(1), loop_of(target=runner(400, page_size), prefix_cache=True)
    texts: list[list[int]] = []
    for _ in range(60):
        prompt = [
            *(rng.choice(texts)[: rng.randint(0, 40)] if texts else []),
            *rng.choices((5, 6), k=rng.randint(1, 9)),
        ]
        before = loop.stats.prefill_tokens
        [[result]] = run(loop, [request_for(prompt, max_new_tokens=3)])
        shared = max((common_prefix(prompt[:-1], text) for text in texts), default=0)
        assert loop.stats.prefill_tokens - before == len(prompt) - shared
        texts.append((prompt + result.token_ids)[:-1])  # the last token is not computed
    check_contents(loop.runners["target"])


def test_a_prompt_does_not_wait_for_a_few_words_in_common() -> None:
    loop = loop_of(target=runner(), prefix_cache=True)
    for i in range(3):
        loop.add(request_for([*COMMON[:15], i + 5, i + 6], max_new_tokens=2))
    loop.step()
    assert loop.stats.prefill_tokens == 3 * 17


def test_a_short_prompt_beside_those_that_wait_is_not_held_back() -> None:
    loop = loop_of(target=runner(), prefix_cache=True)
    requests = [request_for([*COMMON, i], max_new_tokens=2) for i in (5, 6)] + [request_for([7, 8], max_new_tokens=2)]
    for request in requests:
        loop.add(request)
    assert [event.request_id for event in loop.step()] == [1, 3]
    assert [event.request_id for event in loop.step()] == [1, 2, 3]


# --- equality ---------------------------------------------------------------------------------------------------------


def models_of(name: str, **options: Any) -> dict[str, Runner]:
    beside = {"draft": ("draft", 2), "amateur": ("amateur", 9)}.get(name)
    helpers = {} if beside is None else {beside[0]: runner(seed=beside[1], **options)}
    return {"target": runner(**options), **helpers}


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("budget", [40, 1500])
def test_a_step_looks_at_each_prompt_once_and_at_none_beyond_its_budget(
    monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """300 prompts of 30 beginnings: the first of each beginning computes it, the others wait."""
    rng = np.random.default_rng(1)
    beginnings = [rng.integers(3, 96, 40).tolist() for _ in range(30)]
    loop = loop_of(target=runner(2000), max_batch_size=300, chunk=budget, prefix_cache=True)
    for i in range(300):
        request = request_for([*beginnings[i % 30], i // 30 + 3, 7], max_new_tokens=1)
        loop.add(request)
    looks = {"match": 0, "computes_next": 0}

    def counted(name: str) -> Callable[..., Any]:
        plain = getattr(PrefixCache, name)

        def look(*arguments: Any) -> Any:
            looks[name] += 1
            return plain(*arguments)

        return look

    for name in looks:
        monkeypatch.setattr(PrefixCache, name, counted(name))
    waited = 0
    while loop.busy:
        looks.update(match=0, computes_next=0)
        computed = loop.stats.prefill_tokens
        events = loop.step()
        assert looks["match"] <= (300 if computed else 2 * 300), "once more when they begin"
        assert looks["computes_next"] <= 300
        if budget == 40 and computed and loop.stats.prefill_tokens - computed == budget:
            assert looks["match"] <= budget
        waited += looks["computes_next"]
        assert not any(event.error for event in events)
    assert waited >= 30 * 9 or budget == 40
    assert loop.stats.prefill_tokens <= 30 * 40 + 300 * 2


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.slow
def test_every_strategy_says_the_same_with_shared_pages(name: str) -> None:
    """All at once, again when they have finished, and each alone without a cache."""
    prompts = [[*COMMON[:21], 5], [*COMMON[:21], 6, 7], COMMON[:13], [*COMMON[:21], 5], [9, 8], COMMON[:22]]
    requests = [made(prompt, max_new_tokens=7, **STRATEGIES[name]) for prompt in prompts]
    expected = [run(loop_of(**models_of(name)), [request])[0] for request in requests]
    loop = loop_of(prefix_cache=True, chunk=16, **models_of(name, page_size=4))
    for again in (False, True):
        before = loop.stats.prefill_tokens
        ids = dict(added(loop, request) for request in requests)
        finish(loop, ids)
        assert [[r.token_ids for r in results] for results in ids.values()] == [
            [r.token_ids for r in results] for results in expected
        ]
        if name == "naive":
            assert loop.runners["target"].cache.cached_pages == loop.stats.cached_tokens == 0
        elif again and name == "greedy":
            assert loop.stats.prefill_tokens - before <= 6 * 2
    for each in loop.runners.values():
        check_contents(each)


def test_the_draft_shares_its_prompts_too() -> None:
    loop = loop_of(prefix_cache=True, **models_of("draft"))
    fed: list[int] = []
    advance = loop.runners["draft"].cache.advance
    loop.runners["draft"].cache.advance = lambda sequence, count: (fed.append(count), advance(sequence, count))[1]  # type: ignore[method-assign, assignment, return-value]
    for again in (False, True):
        run(loop, [made(COMMON[:50], max_new_tokens=4, models=("draft",))])
        assert (max(fed) == 50) != again
        fed.clear()


@pytest.mark.parametrize("seed", [0, 7, 17])  # in the last one requests are preempted
@pytest.mark.slow
def test_random_forests_of_prompts(seed: int) -> None:
    forest(seed, steps=60)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20, 30))
def test_more_random_forests_of_prompts(seed: int) -> None:
    forest(seed, steps=100)


def forest(seed: int, steps: int) -> None:
    """Prompts of two letters on few small pages, so that beginnings collide and are evicted, with aborts and failures.

    After every step the books balance; the pages hold what their tokens give; each result is that of the request alone.
    """
    rng = random.Random(seed)
    size = rng.choice((1, 2, 4, 8))
    models = models_of(rng.choice(("", "draft", "amateur")), pages=rng.randint(144, 176) // size, page_size=size)
    names = [name for name, fields in STRATEGIES.items() if set(fields.get("models", ())) <= models.keys()]
    loop = loop_of(
        prefix_cache=True, chunk=rng.choice((3, 8, 512)), max_batch_size=8, headroom=rng.choice((2, 32)), **models
    )
    alone = loop_of(**{name: runner_of(each.model, pages=8, page_size=64) for name, each in models.items()})
    whole: dict[int, tuple[Request, list[Result]]] = {}  # requests that nothing ends early, and what they said so far
    for step in range(steps):
        while len(loop.scheduler.running) < 6 and rng.random() < 0.6:
            request = planted(rng, names)
            request_id, results = added(loop, request)
            if not request.settings.logits_processor:
                whole[request_id] = request, results
        for request_id in cut_down(rng, loop):
            whole.pop(request_id, None)
        for event in loop.step():
            if event.request_id in whole:
                assert event.error is None
                whole[event.request_id][1][event.index].token_ids += event.token_ids
        check_loop(loop)
        if step % 20 == 0:
            for each in models.values():
                check_contents(each)
    finish(loop, {request_id: results for request_id, (_, results) in whole.items() if loop.knows(request_id)})
    for request, results in whole.values():
        [expected] = run(alone, [request])
        assert [r.token_ids for r in results] == [r.token_ids for r in expected], request.settings
    assert loop.stats.cached_tokens


def planted(rng: random.Random, names: Sequence[str]) -> Request:
    """A request of any strategy; a few fail after some tokens."""
    fields = dict(STRATEGIES[rng.choice(names)])
    if rng.random() < 0.05 and not fields.keys() & {"models", "prompt_lookup_num_tokens"}:
        fields["logits_processor"] = [failing_after(rng.randint(1, 4))]
    prompt = rng.choices((5, 6), weights=(9, 1), k=rng.randint(1, 24))
    return made(prompt, max_new_tokens=rng.randint(1, 20), **fields)


def cut_down(rng: random.Random, loop: StepLoop) -> list[int]:
    """Sometimes end a running request, or all. Returns those that were ended."""
    running = [one.id for one in loop.scheduler.running]
    if rng.random() < 0.01:
        loop.reset()
        return running
    if not running or rng.random() < 0.95:
        return []
    loop.abort(chosen := rng.choice(running))
    return [chosen]


def failing_after(tokens: int) -> Callable[..., Any]:
    def processor(history: Any, logits: Any, xp: Any) -> Any:
        if history.generated_lengths.max(initial=0) >= tokens:
            raise RuntimeError("no more")
        return logits

    return processor


# --- who computes for others, and what becomes of them ----------------------------------------------------------------


@pytest.mark.parametrize("end", ["abort", "reset"])
def test_who_computes_for_others_may_end_in_the_middle(end: str) -> None:
    target = runner()
    loop = loop_of(target=target, prefix_cache=True, chunk=100)
    requests = [request_for([*COMMON, i], max_new_tokens=4) for i in (5, 6, 7)]
    ids = dict(added(loop, request) for request in requests)
    loop.step()
    assert loop.stats.prefill_tokens == 100
    leader = next(iter(ids))
    if end == "abort":
        loop.abort(leader)
        del ids[leader]
        finish(loop, ids)
        assert loop.stats.prefill_tokens <= 300 + 2 + 4 + 16
    else:
        loop.reset()
        assert target.cache.cached_pages == 0
        loop.step()
        ids = dict(added(loop, request) for request in requests)
        finish(loop, ids)
    expected = run(loop_of(target=runner()), requests[-len(ids) :])
    assert [r[0].token_ids for r in ids.values()] == [r[0].token_ids for r in expected]


@pytest.mark.longer
def test_nan_in_the_pages_of_one_that_computes_for_others_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It appears in a chunk of which no logits are wanted."""
    target = runner()
    loop = loop_of(target=target, prefix_cache=True, chunk=100)
    finish(loop, dict([added(loop, request_for(COMMON[:96], max_new_tokens=1))]))
    requests = [request_for([*COMMON, i], max_new_tokens=4) for i in (5, 6, 7)]
    passes: list[int] = []
    forward = type(target.model).forward

    def spoiled(model: Any, body: Any, batch: Any, storage: Any, **options: Any) -> Any:
        passes.append(batch.num_tokens)
        hidden = forward(model, body, batch, storage, **options)
        if len(passes) == 2:
            storage.values[-1, batch.slot_pages[7], :, batch.slot_offsets[7]] = np.nan
            hidden[7] = np.nan
        return hidden

    monkeypatch.setattr(type(target.model), "forward", spoiled)
    ids = dict(added(loop, request) for request in requests)
    loop.step()
    known = len(nodes_of(target.cache))
    errors = [event.error for event in loop.step()]
    assert len(errors) == 1
    assert isinstance(errors[0], NumericalError)
    assert known == 13
    assert len(nodes_of(target.cache)) == 12, "what it had not computed itself, or another one had taken over before"
    check_contents(target)
    del ids[min(ids)]
    finish(loop, ids)
    check_contents(target)
    expected = run(loop_of(target=runner()), requests[1:])
    assert [r[0].token_ids for r in ids.values()] == [r[0].token_ids for r in expected]


def test_a_failed_request_takes_away_only_what_it_has_computed() -> None:
    target = runner()
    loop = loop_of(target=target, prefix_cache=True)
    run(loop, [request_for(COMMON[:100], max_new_tokens=2)])
    kept = set(nodes_of(target.cache))
    failing = request_for(COMMON[:200], max_new_tokens=9, logits_processor=[failing_after(2)])
    loop.add(failing)
    finish(loop, {})
    assert set(nodes_of(target.cache)) - kept == set()
    again = TokenSequence(COMMON[:200])
    assert target.cache.match(again) >= 96


def test_a_preempted_request_computes_the_rows_that_it_has_asked_for() -> None:
    """A text that has gone further than it lies in the cache: of that it takes what it had itself, no more."""
    loop = loop_of(target=runner(page_size=4), prefix_cache=True)
    [[expected]] = run(loop, [request_for(COMMON[:30], max_new_tokens=20)])
    ids = dict([added(loop, request_for(COMMON[:30], max_new_tokens=16, prompt_lookup_num_tokens=3))])
    preempted = 0
    while loop.busy:
        for event in loop.step():
            ids[event.request_id][0].token_ids += event.token_ids
        for victim in [victim for victim in loop.scheduler.running if victim.started and not victim.recompute]:
            loop.scheduler.preempt(victim)
            preempted += 1
        check_loop(loop)
    assert preempted > 3
    assert next(iter(ids.values()))[0].token_ids == expected.token_ids[:16]


@pytest.mark.longer
def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole() -> None:
    engine, plain = Engine(), Engine(prefix_cache=False)
    text = "A list of colors: red, blue, green,"
    for _ in range(2):
        generation = engine.generate(text, max_new_tokens=4, echo=True, logprobs=True)
        expected = plain.score(text).logprobs
        assert generation.prompt_logprobs is not None
        np.testing.assert_allclose(generation.prompt_logprobs[1:], expected[1:], rtol=0, atol=1e-5)
    assert engine.stats.cached_tokens == 0


def test_an_engine_counts_what_it_finds() -> None:
    engine = Engine(prefix_cache=True)
    text = "A list of colors: red, blue, green,"
    first = engine.generate(text, max_new_tokens=8)
    prompt = len(first.prompt_token_ids)
    assert (engine.stats.prompt_tokens, engine.stats.cached_tokens) == (prompt, 0)
    assert engine.generate(text, max_new_tokens=8).token_ids == first.token_ids
    assert (engine.stats.prompt_tokens, engine.stats.cached_tokens) == (2 * prompt, prompt - 1)
    assert engine.stats.prefill_tokens == prompt + 1
