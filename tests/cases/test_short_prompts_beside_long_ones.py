"""A long prompt does not block the short ones behind it, and is not starved by them.

Every statement is about steps, none about seconds. The loops run a tiny model on the NumPy backend.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minillm.decoding.event import Event
from minillm.decoding.prompt_scores import MAX_ROWS
from minillm.decoding.strategy import Feed, Request
from minillm.engine.loop import StepLoop
from minillm.engine.scheduler import PROMPT_SHARE, Run
from minillm.runner.runner import Runner

from ..scheduling import check_books, counted
from ..tiny import loop_of, request_for, run, runner_of, tiny_model

BUDGET = 32
"""Tokens of a step"""


def runner(pages: int = 400) -> Runner:
    return runner_of(tiny_model(seed=2, max_position_embeddings=1024), pages=pages, page_size=8)


def added(loop: StepLoop, prompt: list[int], *, priority: int = 0, **fields: Any) -> int:
    request = request_for(prompt, max_new_tokens=1, **fields)
    return loop.add(replace(request, priority=priority))


def steps_until_ended(loop: StepLoop, request_id: int) -> int:
    steps = 0
    while loop.knows(request_id):
        loop.step_or_raise()
        steps += 1
    return steps


def text(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(3, 96, length).tolist()


class Watch:
    """The passes for which each prompt has got nothing, seen from outside."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop = loop
        self.idle: dict[Run, int] = {}
        self.most = 0

    def prompts(self) -> dict[Run, int]:
        """The positions in the cache of each running prompt of the smallest priority."""
        running = [run for run in self.loop.scheduler.running if not run.started or run.recompute]
        least = min((run.request.priority for run in running), default=0)
        return {
            run: sum(sequence.cached for sequence in run.live.get("target", ()))
            for run in running
            if run.request.priority == least
        }

    def step(self) -> list[Event]:
        before = self.prompts()
        told = self.loop.step_or_raise()
        after = self.prompts()
        self.idle = {
            run: self.idle.get(run, 0) + 1 if positions == before.get(run) else 0 for run, positions in after.items()
        }
        self.most = max(self.most, *self.idle.values(), 0)
        return told


@pytest.mark.sampled(3)
@pytest.mark.parametrize("longs", [1, 2, 5])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_prompt_of_one_chunk_is_computed_in_two_steps_whatever_long_ones_run(longs: int, prefix_cache: bool) -> None:
    rng = np.random.default_rng(longs)
    loop = loop_of(target=runner(), chunk=BUDGET, prefix_cache=prefix_cache)
    long_ones = [added(loop, text(rng, 700)) for _ in range(longs)]
    for length in (1, 2, BUDGET // 2, BUDGET - 1, BUDGET, BUDGET):
        loop.step_or_raise()
        assert steps_until_ended(loop, added(loop, text(rng, length))) <= 2
    assert all(loop.knows(request_id) for request_id in long_ones)


def test_a_short_prompt_passes_a_long_one_with_the_same_beginning() -> None:
    """The long one computes what both begin with only as far as it has come: the short one computes the rest for it."""
    rng = np.random.default_rng(0)
    common = text(rng, 3 * BUDGET)
    loop = loop_of(target=runner(), chunk=BUDGET, prefix_cache=True)
    long, other = added(loop, [*common, *text(rng, 600)]), added(loop, text(rng, 650))
    loop.step_or_raise()
    assert steps_until_ended(loop, added(loop, [*common, 5])) <= 4
    loop.step_or_raise()
    assert loop.prompt_progress(long)[0] >= len(common)
    assert loop.knows(other)


def test_no_share_is_kept_for_a_prompt_that_waits_for_another_ones_pages() -> None:
    rng = np.random.default_rng(6)
    common = text(rng, 8 * BUDGET)
    loop = loop_of(target=runner(), chunk=BUDGET, prefix_cache=True)
    passes = counted(loop.runners["target"])
    for i in range(6, 0, -1):  # the first to come is the longest
        added(loop, [*common, *text(rng, i)])
    while max((loop.prompt_progress(i)[0] for i in loop._runs), default=0) < len(common):
        loop.step_or_raise()
    assert [sum(counts) for counts in passes[:8]] == [BUDGET] * 8


@pytest.mark.longer
def test_a_long_prompt_gets_its_share_of_every_step_while_short_ones_take_the_rest() -> None:
    rng = np.random.default_rng(1)
    share, length = BUDGET // PROMPT_SHARE, 200
    loop = loop_of(target=runner(), chunk=BUDGET)
    long, steps = added(loop, text(rng, length)), 0
    while loop.knows(long):
        added(loop, text(rng, BUDGET - share))
        before = loop.prompt_progress(long)[0]
        loop.step_or_raise()
        steps += 1
        assert not loop.knows(long) or loop.prompt_progress(long)[0] == before + share
    assert steps == (length - (BUDGET - share)) // share + 1, "at last it is the short one"


@pytest.mark.longer
def test_a_long_prompt_gets_a_share_now_and_then_while_more_short_ones_come_than_can_be_served() -> None:
    rng = np.random.default_rng(1)
    share, length, size = BUDGET // PROMPT_SHARE, 60, 8
    loop = loop_of(target=runner(), chunk=BUDGET, max_batch_size=size)
    long, watch, steps = added(loop, text(rng, length)), Watch(loop), 0
    while loop.knows(long):
        added(loop, text(rng, BUDGET - 1))
        added(loop, text(rng, BUDGET - 1))
        watch.step()
        steps += 1
        assert watch.most < size
        assert steps <= size * length // share
    assert steps > 2 * length // share


def test_a_prompt_whose_text_is_cached_is_a_short_one() -> None:
    rng = np.random.default_rng(2)
    known = text(rng, 500)
    loop = loop_of(target=runner(), chunk=BUDGET, prefix_cache=True)
    steps_until_ended(loop, added(loop, known))
    for _ in range(3):
        added(loop, text(rng, 300))
    loop.step_or_raise()
    assert steps_until_ended(loop, added(loop, [*known, 7, 8, 9])) == 1


def test_a_smaller_priority_comes_before_a_shorter_prompt() -> None:
    rng = np.random.default_rng(3)
    loop = loop_of(target=runner(), chunk=BUDGET)
    short = added(loop, text(rng, 4), priority=1)
    long = added(loop, text(rng, 4 * BUDGET - 4))
    loop.step_or_raise()
    assert loop.prompt_progress(long)[0] == BUDGET
    assert loop.prompt_progress(short)[0] == 0
    assert steps_until_ended(loop, long) == 3
    assert not loop.knows(short), "it got what the other one left of its last step"


def test_a_prompt_that_may_not_be_split_gets_its_turn() -> None:
    """A search that reads each row of its prompt, beside shorter prompts that never cease."""
    rng = np.random.default_rng(4)
    loop = loop_of(target=runner(), chunk=BUDGET, max_batch_size=4)
    passes = counted(loop.runners["target"])
    whole = request_for(text(rng, BUDGET + 8), max_new_tokens=1)
    loop.add(whole)
    added(loop, text(rng, BUDGET - 1))
    scheduler, place = loop.scheduler, loop._place

    def place_whole(run: Run, feeds: list[Feed]) -> None:
        if run.request is whole:
            feeds = [feed._replace(rows="all") for feed in feeds]
        place(run, feeds)

    loop._place = place_whole  # type: ignore[method-assign]
    for _ in range(scheduler.limits.max_batch_size + 1):
        added(loop, text(rng, BUDGET - 1))
        loop.step()
        if any(BUDGET + 8 in counts for counts in passes):
            return
    raise AssertionError(f"it was never computed: {passes}")


def test_a_prompt_whose_rows_are_wanted_gets_some_beside_shorter_ones_that_want_all() -> None:
    """Prompts that report their own log-probabilities share the rows of logits of a pass."""
    rng = np.random.default_rng(5)
    scored = {"echo": True, "logprobs": True}
    loop = loop_of(target=runner(), chunk=512, max_batch_size=4)
    long = added(loop, text(rng, 400), **scored)
    for _ in range(4):
        added(loop, text(rng, 127), **scored)
        loop.step_or_raise()
    assert loop.prompt_progress(long)[0] >= 4 * (MAX_ROWS // PROMPT_SHARE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("pages", "prefix_cache"),
    [(400, False), (60, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(400, True), (60, False)])],
)
@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 6)),
    ],
)
def test_every_prompt_advances_and_ends_and_says_what_it_says_alone(
    seed: int, pages: int, *, prefix_cache: bool
) -> None:
    """Prompts of any length and priority come at any time, some scored, some begin equally; pages may run out."""
    rng = np.random.default_rng(seed)
    target = runner(pages)
    size = 6
    loop = loop_of(target=target, chunk=BUDGET, max_batch_size=size, prefix_cache=prefix_cache, headroom=4)
    passes, watch, common = counted(target), Watch(loop), text(rng, 40)
    requests: dict[int, Request] = {}
    tokens: dict[int, list[int]] = {}
    while len(requests) < 30 or loop.busy:
        if len(requests) < 30 and rng.random() < 0.4:
            prompt = common[: int(rng.choice([0, 0, 30]))]
            prompt += text(rng, int(rng.choice([rng.integers(1, BUDGET + 1), rng.integers(100, 300)])))
            scored: dict[str, Any] = {"echo": True, "logprobs": True} if rng.random() < 0.2 else {}
            request = request_for(prompt, max_new_tokens=int(rng.integers(1, 6)), **scored)
            priority = int(rng.choice([0, 0, 0, 1]))
            request_id = loop.add(replace(request, priority=priority))
            requests[request_id], tokens[request_id] = request, []
        for event in watch.step():
            tokens[event.request_id] += event.token_ids
        check_books(loop)
        assert all(sum(counts) <= BUDGET for counts in passes)
    assert watch.most <= size
    expected = [result.token_ids for (result,) in run(loop_of(target=runner()), list(requests.values()))]
    assert list(tokens.values()) == expected
