"""The scheduler: admission against a short specification, the token budget, deadlines and load."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.batch import TokenSequence
from minillm.decoding.stats import Stats
from minillm.decoding.strategy import Feed
from minillm.engine.loop import StepLoop
from minillm.engine.scheduler import MAX_PASSES, Chunk, Limits, Scheduler
from minillm.errors import ParameterError

from ..scheduling import Outcome, alone, check_books, counted, engine_with_helpers, loop_on, requests_of, run_of
from ..tiny import loop_of, random_prompts, request_for, tiny_runner

# --- admission --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Waiting:
    """A request as the specification sees it."""

    name: int
    width: int
    pages: int
    priority: int
    passed: int = 0


def admitted_by_specification(waiting: list[Waiting], running: list[Waiting], places: int, pages: int) -> list[Waiting]:
    """One after the other, the first that fits, unless it would pass one that was passed often enough."""
    admitted: list[Waiting] = []
    while True:
        places_left = places - sum(one.width for one in running + admitted)
        pages_left = pages - sum(one.pages for one in running + admitted)
        for i, one in enumerate(waiting):  # noqa: B007
            if one.width <= places_left and one.pages <= pages_left:
                break
            if one.passed >= MAX_PASSES:
                return admitted
        else:
            return admitted
        for other in waiting[:i]:
            other.passed += 1
        admitted.append(waiting.pop(i))


@pytest.mark.parametrize("seed", range(4))
def test_who_is_admitted_follows_the_specification(seed: int) -> None:
    """Requests that are promised all their pages come and go; nothing is computed."""
    rng = np.random.default_rng(seed)
    places, pages = 8, 20
    caches: Any = {"target": SimpleNamespace(free_pages=pages, num_pages=pages)}
    scheduler = Scheduler(Limits(places, 8, 8, None), caches, Stats())
    waiting: list[Waiting] = []
    running: list[Waiting] = []
    for turn in range(200):
        if rng.random() < 0.6:
            # seldom more than the batch or the cache can take beside others
            one = Waiting(turn, int(rng.choice([1, 1, 2, 8])), int(rng.choice([1, 2, 3, 15, 20])), int(rng.choice(3)))
            waiting.append(one)
            waiting.sort(key=lambda one: (one.priority, one.name))
            scheduler.add(run_of(one.name, one.width, one.pages, one.priority))
        expected = admitted_by_specification(waiting, running, places, pages)
        assert [run.id for run in scheduler.admit()] == [one.name for one in expected]
        running += expected
        assert max((run.times_passed_over for run in scheduler.waiting), default=0) <= MAX_PASSES
        for run in [run for run in scheduler.running if rng.random() < 0.3]:
            scheduler.remove(run)
            running = [one for one in running if one.name != run.id]
    assert not {run.id for run in scheduler.waiting} ^ {one.name for one in waiting}


def test_a_small_request_passes_a_large_one_but_not_for_ever() -> None:
    """A holds the cache for long, B needs all of it, and small ones come again and again."""
    runner = tiny_runner(seed=2, pages=16, page_size=4)
    loop = loop_of(target=runner, headroom=None)

    def add(prompt: int, new: int) -> int:
        request = request_for([7] * prompt, max_new_tokens=new)
        return loop.add(request)

    add(4, 40)
    loop.step()
    large = add(20, 40)
    small = {add(1, 3) for _ in range(2 * MAX_PASSES)}
    admitted: list[int] = []
    while large not in admitted:
        loop.step()
        admitted += [run.id for run in loop.scheduler.running if run.id not in admitted]
    assert len(small & {*admitted[: admitted.index(large)]}) == MAX_PASSES
    while loop.busy:
        loop.step()


@pytest.mark.longer
def test_smaller_priorities_run_first_and_equal_ones_as_they_came() -> None:
    loop = loop_of(target=tiny_runner(seed=2), max_batch_size=1)
    priorities = [0, 2, 1, -1, 1, 2, -1]
    ids = [loop.add(replace(request_for([5 + i]), priority=p)) for i, p in enumerate(priorities)]
    ended = []
    while loop.busy:
        ended += [event.request_id for event in loop.step() if event.finish_reason]
    assert ended == [ids[i] for i in (3, 6, 0, 2, 4, 1, 5)]


# --- the token budget -------------------------------------------------------------------------------------------------


def piece(pending: int, whole: int = 1) -> Chunk:
    sequence = TokenSequence([0] * (2 + pending), cached=2)
    run = run_of(0, 1, 1, 0)
    run.feeds = [Feed((0,))]
    return Chunk(run, 0, sequence, pending, whole)


@pytest.mark.parametrize(
    ("pending", "budget", "counts"),
    [
        ([(20, 1)], 8, [8]),
        ([(3, 1), (20, 1), (5, 1)], 8, [3, 5]),
        ([(3, 1), (9, 6), (2, 1)], 8, [3, 3, 2]),  # the last six of the second are left for the next pass
        ([(20, 20), (3, 1)], 8, [20]),  # cannot be split, and nothing came before it
        ([(3, 1), (20, 20), (3, 1)], 8, [3, 3]),
        ([(5, 0)], 8, [5]),
        ([], 8, []),
    ],
)
def test_prompts_share_the_budget_in_their_order(
    pending: list[tuple[int, int]], budget: int, counts: list[int]
) -> None:
    scheduler, cache = Scheduler(Limits(4, 8, 8), {}, Stats()), tiny_runner().cache
    assert [one.tokens for one in scheduler.chunks([piece(*each) for each in pending], budget, cache)] == counts


@pytest.mark.parametrize("budget", [8, 16, 31])
def test_prompts_get_what_decoding_sequences_leave(budget: int) -> None:
    runner = tiny_runner(seed=2, pages=200, page_size=4)
    loop, passes = StepLoop({"target": runner}, Limits(16, budget, 24)), counted(runner)
    for prompt in random_prompts(6, longest=6):
        loop.add(request_for(prompt))
    loop.step()
    assert sum(passes[0]) <= 24
    while any(not run.started for run in loop.scheduler.running):
        loop.step()
    for length in (40, 41):
        request = request_for([7] * length, max_new_tokens=3)
        loop.add(request)
    passes.clear()
    while len(loop.scheduler.running) > 7 or not passes:
        loop.step()
    chunks = [sum(counts) - counts.count(1) for counts in passes if max(counts) > 1]
    assert all(sum(counts) <= budget for counts in passes)
    assert passes[0].count(1) == 6 and sum(passes[0]) == budget
    assert len(chunks) >= 81 // budget
    while loop.busy:
        loop.step()


def test_prompts_are_not_starved_by_guesses_that_use_up_the_budget() -> None:
    runner = tiny_runner(seed=2, pages=200, page_size=4)
    loop, passes = StepLoop({"target": runner}, Limits(4, 16, 16)), counted(runner)
    for prompt in random_prompts(3):
        request = request_for(prompt, max_new_tokens=40, lookahead_window=4)
        loop.add(request)
    while not all(run.started for run in loop.scheduler.running) or not passes:
        loop.step()
    request = request_for([7] * 20, max_new_tokens=1)
    last, steps = loop.add(request), 0
    while loop.knows(last):
        loop.step()
        steps += 1
    assert max(sum(counts) for counts in passes) > 16
    assert steps <= 20 // (16 // 8)


@pytest.fixture(scope="module", params=["numpy", pytest.param("cpu", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine_with_helpers(request.param, tmp_path_factory.mktemp("engine")) as engine:
        yield engine


def test_a_budget_below_the_batch_is_refused(engine: Engine) -> None:
    with pytest.raises(ParameterError, match="max_batched_tokens should be at least max_batch_size, which is 16, f"):
        Engine(max_batched_tokens=8)
    assert engine._driver.loop.scheduler.limits == Limits(1, 128, 512)
    with Engine(max_batch_size=4, max_batched_tokens=600) as other:
        assert other._driver.loop.scheduler.limits == Limits(4, 600, 600)
        other.add([5, 6], max_new_tokens=3)
        assert (other.load().waiting, other.load().running) == (1, 0)
        other.step()
        assert (other.load().waiting, other.load().running) == (0, 1)


# --- deadlines and load -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["greedy", "samples", "draft", "guided", "beams"])
def test_a_deadline_ends_a_request_with_what_there_is(
    engine: Engine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    request = requests_of(engine, kind, [40, 41, 42], max_new_tokens=20)
    expected, _ = alone(engine, request)
    loop, outcomes = loop_on(engine, 99, size=request.settings.num_beams + 2), {}
    runs = loop.add(replace(request, created=1000.0, timeout=1.0))
    waits = loop.add(replace(requests_of(engine, "samples", [5, 6]), created=1000.0, timeout=0.5))
    loop.add(replace(requests_of(engine, "greedy", [7]), created=1000.0, timeout=1000.0))
    outcomes = {request_id: Outcome() for request_id in loop._runs}
    for _ in range(99):
        for event in loop.step():
            outcomes[event.request_id].add(event)
        now[0] += 0.125
        check_books(loop)
        if not loop.busy:
            break
    first, _, third = outcomes.values()
    assert set(first.reasons.values()) == {"timeout"}
    if kind == "beams":
        assert len(first.tokens) == 2 and 5 < len(first.tokens[0]) < 20 and first.scores
    else:
        assert all(0 < len(tokens) < 20 for tokens in first.tokens.values())
        assert all(tokens == expected.tokens[i][: len(tokens)] for i, tokens in first.tokens.items())
    assert not loop.knows(runs) and not loop.knows(waits)
    assert set(third.reasons.values()) == {"length"}
    assert all(runner.cache.free_pages == runner.cache.num_pages for runner in loop.runners.values())


def test_the_load_counts_requests_sequences_and_pages(engine: Engine) -> None:
    loop = loop_on(engine, 20, size=4)
    idle = loop.load()
    assert (idle.waiting, idle.running, idle.sequences, idle.free_pages, idle.total_pages) == (0, 0, 0, 20, 20)
    for kind in ("samples", "greedy", "greedy"):
        request = requests_of(engine, kind, [40, 41, 42, 43, 44], max_new_tokens=5)
        loop.add(request)
    loop.step()
    loop.step()
    load = loop.load()
    assert (load.waiting, load.running, load.sequences, load.preemptions) == (1, 2, 4, 0)
    assert load.free_pages == 20 - (1 + 3) - 2
    loop.scheduler.preempt(loop.scheduler.running[-1])
    load = loop.load()
    assert (load.waiting, load.running, load.sequences, load.preemptions) == (2, 1, 3, 1)
    while loop.busy:
        loop.step()
