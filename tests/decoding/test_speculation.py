"""The strategy interface carries what comes next: speculation gives exactly the greedy tokens, in fewer steps."""

from dataclasses import replace

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.decoding.strategy import Request
from minillm.engine.loop import StepLoop
from minillm.runner.runner import Runner

from ..comparing import assert_same_tokens
from ..tiny import VARIANTS, generate, logits_of, loop_of, random_prompts, request_for, run, runner_of, tiny_model
from .speculation import DraftSpeculation, NGramSpeculation

PROMPTS = random_prompts(8, seed=4)


class Recording:
    """Mixed into a strategy: keeps the states that `begin` made."""

    def begin(self, request: Request):
        state, feeds = super().begin(request)
        self.__dict__.setdefault("states", []).append(state)
        return state, feeds


class NGram(Recording, NGramSpeculation):
    pass


class Draft(Recording, DraftSpeculation):
    pass


def repetitive(variant: str = "pre-norm") -> Runner:
    """A model that says the same few tokens again and again, so that n-grams guess well."""
    model = tiny_model(variant, seed=2)
    model.embedding.positions.data[:] *= 0.02
    return runner_of(model, pages=100, page_size=4)


def draft_of(target: Runner, noise: float) -> Runner:
    """A model with one layer fewer whose own weights are the target's, a little off: it often guesses right."""
    raw = {"num_hidden_layers": 1}
    model = tiny_model("pre-norm", seed=2, **raw)
    rng = np.random.default_rng(0)
    model.embedding.tokens.data[:] += noise * rng.standard_normal(model.embedding.tokens.shape, np.float32)
    return runner_of(model, pages=target.cache.num_pages, page_size=8)


def assert_greedy(runner: Runner, requests: list[Request], results, **fields) -> None:
    for request, (result,) in zip(requests, results, strict=True):
        prompt = request.prompt_ids
        [expected] = generate(runner, [prompt], max_new_tokens=request.max_new_tokens, **fields)
        assert_same_tokens(result.token_ids, expected, lambda tokens, p=prompt: logits_of(runner, p + tokens)[-1])


def assert_all_free(*runners: Runner) -> None:
    assert all(runner.cache.free_pages == runner.cache.num_pages for runner in runners)


@pytest.mark.parametrize("fields", [{}, {"use_cache": False}, {"eos_token_id": (20, 30, 40)}], ids=str)
@pytest.mark.parametrize("chunk", [512, 3])
@pytest.mark.slow
def test_n_gram_speculation_gives_the_greedy_tokens_in_fewer_steps(chunk: int, fields: dict) -> None:
    runner = repetitive()
    requests = [request_for(p, max_new_tokens=40, **fields) for p in PROMPTS]
    plain, speculative = loop_of(target=runner), loop_of(target=runner, chunk=chunk)
    strategy = NGram(requests[0].settings)
    assert_greedy(runner, requests, run(speculative, requests, strategy), **fields)
    run(plain, requests)
    accepted = [sum(state.accepted) for state in strategy.states]
    assert len(set(accepted)) > 2  # the sequences of one batch accept different numbers
    if chunk == 512 and not fields:
        assert speculative.stats.steps < 0.7 * plain.stats.steps
    assert_all_free(runner)


@pytest.mark.longer
@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name == "pre-norm" else pytest.mark.exhaustive) for name in VARIANTS],
)
def test_n_gram_speculation_on_every_variant(variant: str) -> None:
    runner = repetitive(variant)
    requests = [request_for(p, max_new_tokens=20) for p in PROMPTS]
    assert_greedy(runner, requests, run(loop_of(target=runner), requests, NGram(requests[0].settings)))


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.1, 5.0], ids=["good draft", "fair draft", "bad draft"])
def test_a_draft_model_gives_the_greedy_tokens_of_the_target(noise: float) -> None:
    target = runner_of(tiny_model(seed=2), pages=100, page_size=4)
    draft = draft_of(target, noise)
    requests = [request_for(p, max_new_tokens=30) for p in PROMPTS]
    strategy = Draft(requests[0].settings)
    loop = loop_of(target=target, draft=draft)
    assert_greedy(target, requests, run(loop, requests, strategy))
    accepted = [sum(state.accepted) for state in strategy.states]
    if noise < 1:
        assert sum(accepted) > 20
        assert len(set(accepted)) > 2
    assert_all_free(target, draft)


@pytest.mark.longer
def test_each_model_is_fed_only_what_it_has_not_seen() -> None:
    """The target computes each accepted token once, and each refused guess once."""
    target = runner_of(tiny_model(seed=2), pages=100, page_size=4)
    requests = [request_for(p, max_new_tokens=30) for p in PROMPTS]
    strategy = Draft(requests[0].settings)
    fed = {"target": 0, "draft": 0}
    runners = {"target": target, "draft": draft_of(target, 0.1)}
    for name, runner in runners.items():
        runner.forward = counting(runner.forward, fed, name)
    run(StepLoop(runners, loop_of(target=target).scheduler.limits), requests, strategy)
    verified = sum(len(state.accepted) - 1 for state in strategy.states)
    prompts = sum(map(len, PROMPTS))
    assert fed["target"] <= prompts + verified * (1 + Draft.longest)
    assert fed["draft"] <= prompts + verified * (2 + Draft.longest)


def counting(forward, fed: dict[str, int], name: str):
    def counted(sequences, counts, *wanted):
        fed[name] += sum(counts)
        return forward(sequences, counts, *wanted)

    return counted


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy_class", [NGram, Draft])
def test_a_draft_of_another_width(strategy_class: type) -> None:
    """The draft's hidden states are narrower than the target's, and nobody asked for either."""
    target = runner_of(tiny_model(seed=2), pages=100, page_size=4)
    narrow = {"hidden_size": 16, "word_embed_proj_dim": 16, "num_attention_heads": 2}
    draft = runner_of(tiny_model(seed=2, **narrow), pages=100, page_size=4)
    requests = [request_for(p, max_new_tokens=12) for p in PROMPTS]
    assert_greedy(
        target, requests, run(loop_of(target=target, draft=draft), requests, strategy_class(requests[0].settings))
    )


@pytest.mark.slow
def test_one_back_end_may_run_both_models() -> None:
    """Its arena is used again by each forward pass: what the target gave must outlive the draft's pass."""
    backend = NumpyBackend()
    target = runner_of(tiny_model(seed=2, backend=backend), pages=100, page_size=4, backend=backend)
    draft = runner_of(tiny_model(seed=9, num_hidden_layers=1, backend=backend), pages=100, page_size=4, backend=backend)
    requests = [request_for(p, max_new_tokens=20) for p in PROMPTS]
    loop = loop_of(target=target, draft=draft)
    speculation, lookup = Draft(requests[0].settings), NGram(requests[0].settings)
    tokens: dict[int, list[int]] = {
        loop.add(replace(request, strategy=speculation if i % 2 else lookup)): [] for i, request in enumerate(requests)
    }
    while loop.busy:
        for event in loop.step():
            tokens[event.request_id] += event.token_ids
    for prompt, ours in zip(PROMPTS, tokens.values(), strict=True):
        [expected] = generate(target, [prompt])
        assert_same_tokens(ours, expected, lambda line, p=prompt: logits_of(target, p + line)[-1])


def test_speculation_takes_over_a_kept_prefix() -> None:
    runner = repetitive()
    loop = loop_of(target=runner, prefix_cache=True)
    line = PROMPTS[0]
    for prompt in PROMPTS[1:4]:
        request = request_for(line, max_new_tokens=8)
        results = run(loop, [request], NGram(request.settings))
        assert_greedy(repetitive(), [request], results)
        line = line + results[0][0].token_ids + prompt[:6]
    assert loop.stats.prefill_tokens < len(line)
