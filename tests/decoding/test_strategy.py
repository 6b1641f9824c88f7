"""The contract of a strategy's feeds: rows, hidden states and their order, whatever else runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from minillm.backends.token_sampler import TokenSampler
from minillm.batch import TokenSequence
from minillm.decoding.strategy import Feed, Request, Rows, State, Strategy
from minillm.runner.runner import Runner

from ..tiny import logits_of, loop_of, random_prompts, request_for, run, runner_of, tiny_model, tiny_runner

PROMPTS = random_prompts(5, seed=6, longest=14)


@dataclass(eq=False)
class Seen(State):
    """All that one request was shown: logits and hidden states of each of its feeds, step by step."""

    steps: list[list[tuple[np.ndarray, np.ndarray | None]]] = field(default_factory=list)


class Script(Strategy):
    """Feeds what a script says, and keeps what comes back."""

    def __init__(self, settings, script) -> None:
        super().__init__(settings)
        self.script = script
        """prompt -> the feeds of each step"""
        self.seen: list[Seen] = []

    def begin(self, request: Request) -> tuple[Seen, list[Feed]]:
        state = Seen(request, [request.continuation(0)])
        self.seen.append(state)
        return state, self.script(request.prompt_ids)[0]

    def step(self, sampler: TokenSampler, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        assert len(rows.starts) == 1 + sum(state.feeds for state in states)
        spans, answers = iter(zip(rows.starts, rows.starts[1:], strict=False)), []
        for state in states:
            mine = [next(spans) for _ in range(state.feeds)]
            hidden = rows.hidden
            state.steps.append(
                [(rows.logits[a:b].copy(), None if hidden is None else hidden[a:b].copy()) for a, b in mine]
            )
            rest = self.script(state.request.prompt_ids)[len(state.steps) :]
            answers.append(rest[0] if rest else [])
        return answers


def play(script, *, chunk: int = 512, **runners: Runner) -> list[Seen]:
    runners = runners or {"target": tiny_runner(seed=2, page_size=4)}
    requests = [request_for(p, max_new_tokens=20, num_beams=4) for p in PROMPTS]  # room for four sequences each
    strategy = Script(requests[0].settings, script)
    run(loop_of(chunk=chunk, max_batch_size=32, **runners), requests, strategy)
    assert all(runner.cache.free_pages == runner.cache.num_pages for runner in runners.values())
    return strategy.seen


def hidden_of(runner: Runner, line: list[int]) -> np.ndarray:
    apart = runner_of(runner.model, pages=1, page_size=len(line))
    return apart.forward([TokenSequence(list(line))], [len(line)], rows=range(len(line))).hidden.copy()


MODEL = tiny_runner(seed=2)


def assert_rows(seen: np.ndarray, line: list[int], last: int) -> None:
    """The logits after each of the `last` tokens of a line."""
    np.testing.assert_allclose(seen, logits_of(MODEL, line)[-last:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [3, 512])
def test_the_last_row_or_all_rows_come_as_asked(chunk: int) -> None:
    def script(prompt: list[int]) -> list[list[Feed]]:
        ragged = [9] * (1 + prompt[0] % 3)
        return [[Feed(prompt, rows="all")], [Feed(ragged, parent=0)], [Feed([7, 8, 5], parent=0, rows="all")]]

    for seen in play(script, chunk=chunk):
        prompt = seen.request.prompt_ids
        line = prompt + [9] * (1 + prompt[0] % 3)
        [(first, _)], [(second, _)], [(third, _)] = seen.steps
        assert_rows(first, prompt, len(prompt))
        assert_rows(second, line, 1)
        assert_rows(third, [*line, 7, 8, 5], 3)


def test_several_feeds_may_have_one_parent_and_keep_different_parts_of_it() -> None:
    def script(prompt: list[int]) -> list[list[Feed]]:
        n = len(prompt)
        tree = [Feed([50], parent=0), Feed([60, 61], parent=0, keep=n // 2, rows="all"), Feed([70], parent=0, keep=0)]
        swap = [Feed([51], parent=2), Feed([52], parent=0), Feed([62], parent=1, keep=n // 2 + 1)]
        return [[Feed(prompt)], tree, swap]

    for seen in play(script):
        prompt = seen.request.prompt_ids
        half = prompt[: len(prompt) // 2]
        _, tree, swap = seen.steps
        assert_rows(tree[0][0], [*prompt, 50], 1)
        assert_rows(tree[1][0], [*half, 60, 61], 2)
        assert_rows(tree[2][0], [70], 1)
        assert_rows(swap[0][0], [70, 51], 1)
        assert_rows(swap[1][0], [*prompt, 50, 52], 1)
        assert_rows(swap[2][0], [*half, 60, 62], 1)


def test_a_feed_without_a_parent_begins_anew() -> None:
    for seen in play(lambda prompt: [[Feed(prompt)], [Feed([5, 6], rows="all"), Feed([9], parent=0)]]):
        assert_rows(seen.steps[1][0][0], [5, 6], 2)
        assert_rows(seen.steps[1][1][0], [*seen.request.prompt_ids, 9], 1)


@pytest.mark.parametrize("variant", ["pre-norm", "post-norm", "no-final-norm"])
def test_hidden_states_come_when_a_feed_wants_them(variant: str) -> None:
    runner = tiny_runner(variant, seed=2, page_size=4)
    script = lambda prompt: [  # noqa: E731
        [Feed(prompt, rows="all", hidden=True)],
        [Feed([9], parent=0)],
        [Feed([8], parent=0, hidden=True)],
    ]
    for seen in play(script, target=runner):
        prompt = seen.request.prompt_ids
        [(_, first)], [(_, second)], [(_, third)] = seen.steps
        np.testing.assert_allclose(first, hidden_of(runner, prompt), rtol=0, atol=1e-5)
        if second is not None:  # another request in the same step wants them
            np.testing.assert_allclose(second, hidden_of(runner, [*prompt, 9])[-1:], rtol=0, atol=1e-5)
        np.testing.assert_allclose(third, hidden_of(runner, [*prompt, 9, 8])[-1:], rtol=0, atol=1e-5)


def test_a_model_that_is_not_fed_keeps_its_sequences() -> None:
    other = runner_of(tiny_model(seed=7, num_hidden_layers=1), page_size=4)

    def script(prompt: list[int]) -> list[list[Feed]]:
        both = [Feed(prompt), Feed(prompt, model="other")]
        return [both, [Feed([9], parent=0)], [Feed([8], parent=0, model="other")], [Feed([7], parent=0)]]

    for seen in play(script, target=tiny_runner(seed=2, page_size=4), other=other):
        prompt = seen.request.prompt_ids
        assert_rows(seen.steps[1][0][0], [*prompt, 9], 1)
        np.testing.assert_allclose(seen.steps[2][0][0], logits_of(other, [*prompt, 8])[-1:], rtol=0, atol=1e-5)
        assert_rows(seen.steps[3][0][0], [*prompt, 9, 7], 1)


def test_rows_of_a_prompt_whose_beginning_is_kept() -> None:
    """All rows were asked for, so none may be taken from the cache of what finished before."""
    line = PROMPTS[0] * 2
    loop = loop_of(target=tiny_runner(seed=2, page_size=4), prefix_cache=True)
    for prompt in (line, [*line, 5], [*line, 6, 7]):
        request = request_for(prompt)
        strategy = Script(request.settings, lambda p: [[Feed(p, rows="all")]])
        run(loop, [request], strategy)
        assert_rows(strategy.seen[0].steps[0][0][0], prompt, len(prompt))
