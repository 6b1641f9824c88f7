"""Requests that give their pages back and get them again, alone and in random workloads."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from minillm import Engine
from minillm.batch import TokenSequence
from minillm.decoding.stats import Stats
from minillm.decoding.strategy import Request, State
from minillm.engine.loop import StepLoop
from minillm.engine.preemption import choose_victim, lost_positions
from minillm.engine.scheduler import Limits, Run, Scheduler
from minillm.errors import CacheFullError

from ..scheduling import (
    STRATEGIES,
    Outcome,
    alone,
    check_books,
    counted,
    engine_with_helpers,
    loop_on,
    requests_of,
    run_of,
)
from ..tiny import generate, loop_of, request_for, tiny_runner

QUICK = ("beams", "contrastive", "lookahead", "draft samples", "guided beams", "adapter")
"""Those that are preempted in the quick tests"""


@pytest.fixture(scope="module", params=["numpy", pytest.param("cpu", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine_with_helpers(request.param, tmp_path_factory.mktemp("engine")) as engine:
        yield engine


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "every"),
    [
        *(pytest.param(kind, 3, marks=() if kind in QUICK else pytest.mark.exhaustive) for kind in STRATEGIES),
        *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in STRATEGIES),
    ],
)
def test_a_preempted_request_gives_the_same_and_fits_into_the_same_pages(engine: Engine, kind: str, every: int) -> None:
    """Preempted again and again, in a cache with no page more than it may need when it is never preempted."""
    request = requests_of(engine, kind, [40, 41, 42, 43, 44, 45, 46], max_new_tokens=14, seed=3)
    expected, _ = alone(engine, request)
    roomy = loop_on(engine, 99)
    roomy.add(request)
    loop = loop_on(engine, roomy.scheduler.waiting[0].max_pages, budget=5)
    outcome, steps, last = Outcome(), 0, []
    loop.add(request)
    while loop.busy:
        for event in loop.step():
            outcome.add(event)
        check_books(loop)
        steps += 1
        fed = [list(sequence.token_ids) for run in loop.scheduler.running for sequence in run.fed]
        if steps % every == 0 and fed != last:  # it has gone on since
            last = fed
            for run in list(loop.scheduler.running):
                loop.scheduler.preempt(run)
            check_books(loop)
            assert all(runner.cache.free_pages == runner.cache.num_pages for runner in loop.runners.values())
    assert outcome == expected
    assert loop.stats.preemptions >= 2


def test_the_common_prefix_of_beams_is_recomputed_once(engine: Engine) -> None:
    request = requests_of(engine, "beams", list(range(40, 70)), max_new_tokens=12)
    loop = loop_on(engine, 60)
    loop.add(request)
    for _ in range(6):
        loop.step()
    [run] = loop.scheduler.running
    lines = [sequence.token_ids[: sequence.cached] for sequence in run.live["target"]]
    distinct = len({tuple(line[: i + 1]) for line in lines for i in range(len(line))})
    before = loop.runners["target"].cache.free_pages
    loop.scheduler.preempt(run)
    computed = loop.stats.prefill_tokens
    while not loop.scheduler.running or run.recompute:
        loop.step()
    assert loop.stats.prefill_tokens - computed in range(distinct, distinct + 4)  # and perhaps its pending tokens
    assert loop.runners["target"].cache.free_pages >= before - 3
    loop.abort(run.id)


def test_a_sequence_that_is_a_prefix_of_another_shares_its_last_page_again() -> None:
    """As a fork of fewer positions does, until it writes to that page."""
    runner = tiny_runner(seed=2, pages=8, page_size=4)
    long = TokenSequence(list(range(3, 14)))
    runner.forward([long], [10])
    short = runner.cache.fork(long, 6)
    short.token_ids += [50]
    apart = TokenSequence([3, 4, 60, 61])
    runner.forward([apart], [3])
    lines = [list(sequence.token_ids) for sequence in (short, long, apart)]
    assert runner.cache.free_pages == 8 - 4
    request = request_for([5])
    run = Run(1, request, 3, live={"target": [short, long, apart]}, started=True)
    scheduler = Scheduler(Limits(4, 8, 8), {"target": runner.cache}, Stats())
    scheduler.running.append(run)
    scheduler.preempt(run)
    assert runner.cache.free_pages == 8
    assert scheduler.admit() == [run]
    while work := scheduler.schedule("target"):
        runner.forward([one.sequence for one in work], [one.tokens for one in work])
    assert (short.cached, long.cached, apart.cached, runner.cache.free_pages) == (6, 10, 3, 8 - 4)
    assert [short.token_ids, long.token_ids, apart.token_ids] == lines


def test_the_first_request_is_never_preempted_even_if_it_is_the_cheapest() -> None:
    runner = tiny_runner(seed=2, pages=12, page_size=4)
    loop = loop_of(target=runner, headroom=0)
    first, *_ = [
        loop.add(request)
        for request in (request_for([5 + i] * length, max_new_tokens=15) for i, length in enumerate((1, 18, 18)))
    ]
    while loop.knows(first):
        loop.step()
        assert not loop.knows(first) or first in [run.id for run in loop.scheduler.running]
    assert loop.stats.preemptions > 0
    while loop.busy:
        loop.step()


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("headroom", [None, 20])
def test_nobody_is_preempted_who_was_promised_all_pages(engine: Engine, headroom: int | None) -> None:
    """Prompts of several chunks, which take their pages one after the other, beside those that decode."""
    loop = loop_on(engine, 24, budget=8, headroom=headroom)
    kinds = ["samples", "samples", "greedy", "beams", "draft", "greedy", "lookahead", "contrastive"]
    for i, kind in enumerate(kinds):
        request = requests_of(engine, kind, [5 + i] * (20 - i), max_new_tokens=16)
        loop.add(request)
    most = 0
    while loop.busy:
        loop.step_or_raise()
        most = max(most, len(loop.scheduler.running))
    assert most > 1
    assert loop.stats.preemptions == 0


def test_what_was_preempted_waits_before_what_has_never_run() -> None:
    scheduler = Scheduler(Limits(4, 8, 8), {}, Stats())
    runs = [run_of(i, 1, 1, priority) for i, priority in enumerate((0, 0, 1, 1, 0))]
    for i in (1, 3):
        runs[i].state = State(runs[i].request)
    for run in runs:
        scheduler.add(run)
    assert [run.id for run in scheduler.waiting] == [1, 0, 4, 3, 2]


@pytest.mark.longer
def test_two_that_do_not_fit_together_both_end() -> None:
    """Each of them needs all pages at its end; neither preempts the other for ever."""
    runner = tiny_runner(seed=2, pages=12, page_size=4)
    prompts = [[7, 8, 9], [9, 8, 7], [5, 5, 5]]
    loop, tokens = loop_of(target=runner, headroom=0), {}
    for prompt in prompts:
        request = request_for(prompt, max_new_tokens=45)
        tokens[loop.add(request)] = []
    while loop.busy:
        for event in loop.step():
            tokens[event.request_id] += event.token_ids
        check_books(loop)
    assert list(tokens.values()) == generate(tiny_runner(seed=2), prompts, max_new_tokens=45)
    assert loop.stats.preemptions >= 2
    assert loop.stats.steps <= 3 * (45 + 2)


@pytest.mark.longer
def test_nobody_is_preempted_for_a_request_of_lower_priority() -> None:
    runner = tiny_runner(seed=2, pages=12, page_size=4)
    loop, preempted = loop_of(target=runner, headroom=0), []
    preempt = loop.scheduler.preempt

    def noting(run: Run) -> None:
        preempted.append((run.request.priority, lost_positions(run, loop.scheduler.caches)))
        assert run is not loop.scheduler.running[0]
        assert all(other.request.priority <= run.request.priority for other in loop.scheduler.running)
        preempt(run)

    loop.scheduler.preempt = noting  # type: ignore[method-assign]
    ids = []
    for prompt, priority in (([5] * 3, 1), ([6] * 9, 2), ([7] * 3, 2), ([8] * 3, 0)):
        ids.append(loop.add(replace(request_for(prompt, max_new_tokens=36), priority=priority)))
    ended = []
    while loop.busy:
        ended += [event.request_id for event in loop.step() if event.finish_reason]
        check_books(loop)
    assert ended[:2] == [ids[3], ids[0]]
    assert preempted[0][0] == 2
    assert preempted[0][1] < 9 + 3  # the third, which has computed less than the second


@pytest.mark.longer
def test_a_model_whose_keys_follow_the_length_is_never_preempted() -> None:
    from ..models.test_llama import CONFIGS
    from ..tiny import model_of, runner_of

    raw = next(iter(CONFIGS.values())) | {
        "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    }
    runner = runner_of(model_of(raw, seed=2), pages=8, page_size=4)
    assert runner.model.config.keys_follow_length
    loop = loop_of(target=runner, headroom=0)
    for _ in range(4):
        request = request_for([5] * 5, max_new_tokens=15, vocab_size=runner.model.config.vocab_size)
        loop.add(request)
    while loop.busy:
        loop.step_or_raise()
        assert len(loop.scheduler.running) <= 1
    assert loop.stats.preemptions == 0


def test_a_request_that_never_fits_is_refused_and_a_fault_in_the_books_shows(engine: Engine) -> None:
    loop = loop_on(engine, 4)
    with pytest.raises(CacheFullError, match="may need 5 pages of the K/V cache, which has 4"):
        loop.add(engine.request([5] * 10, max_new_tokens=8))
    request = engine.request([5] * 10, max_new_tokens=4, num_assistant_tokens=0)
    loop.add(request)
    loop.step()
    loop.runners["target"].cache._references[0] += 1
    with pytest.raises(AssertionError):
        check_books(loop)


def test_pages_that_others_use_too_cost_nothing_to_recompute() -> None:
    """Of two equally long requests the one is preempted that shares its beginning with the first."""
    runner = tiny_runner(seed=2, pages=64, page_size=4)
    loop, common = loop_of(target=runner, prefix_cache=True), list(range(10, 30))
    for prompt in ([*common, 5], list(range(40, 61)), [*common, 6]):
        request = request_for(prompt, max_new_tokens=9)
        loop.add(request)
        loop.step()
        loop.step()
    scheduler = loop.scheduler
    assert [lost_positions(run, scheduler.caches) for run in scheduler.running] == [6, 24, 2]
    assert choose_victim(scheduler.running[1], scheduler.running, scheduler.caches, "target") is scheduler.running[2]
    while loop.busy:
        loop.step()


# --- random workloads -------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """A request of a workload: when it comes, and what becomes of it."""

    request: Request
    kind: str
    arrives: int
    priority: int
    aborted: int | None
    """Step at which it is aborted"""
    overdue: int | None
    """Step at which its deadline has passed"""
    outcome: Outcome = field(default_factory=Outcome)
    id: int = -1

    def timed(self) -> Request:
        """The request with its priority, made at step 0."""
        return replace(self.request, priority=self.priority, created=0.0, timeout=self.overdue)


def random_works(engine: Engine, rng: np.random.Generator, kinds: list[str], count: int) -> list[Work]:
    common = rng.integers(3, 500, 12).tolist()
    works = []
    for i in range(count):
        kind = kinds[int(rng.integers(len(kinds)))]
        prompt = (common if rng.random() < 0.5 else []) + rng.integers(3, 500, rng.integers(1, 14)).tolist()
        least = 2 if kind == "constrained" else 1  # the tokens of its phrases
        request = requests_of(engine, kind, prompt, max_new_tokens=max(least, int(rng.integers(1, 22))), seed=i)
        cut = {0: "aborted", 1: "overdue"}.get(int(rng.integers(10)))
        at = int(rng.integers(12, 60))
        works.append(
            Work(
                request,
                kind,
                arrives=int(rng.integers(0, 12)),
                priority=int(rng.choice([0, 0, 0, 1, -1])),
                aborted=at if cut == "aborted" else None,
                overdue=at if cut == "overdue" else None,
            )
        )
    return works


def pages_needed(engine: Engine, request: Request) -> int:
    loop = loop_on(engine, 200)
    loop.add(request)
    return max(run.max_pages for run in loop.scheduler.waiting)


def check_outcome(work: Work, expected: Outcome) -> None:
    """A request that was left alone has ended as it does alone; one that was cut off has begun so."""
    for index, reason in work.outcome.reasons.items():
        if reason in ("abort", "timeout"):
            assert reason == ("timeout" if work.aborted is None else "abort")
            tokens = work.outcome.tokens[index]
            assert work.request.settings.num_beams > 1 or tokens == expected.tokens[index][: len(tokens)], work.kind
        else:
            assert work.outcome.tokens[index] == expected.tokens[index], work.kind
            assert work.outcome.texts[index] == expected.texts[index]
            assert (reason, work.outcome.scores.get(index)) == (expected.reasons[index], expected.scores.get(index))
    assert work.outcome.reasons.keys() >= expected.reasons.keys()


def advance(loop: StepLoop, works: list[Work], step: int) -> None:
    """Add and abort what is due, run a step, and check what it has computed."""
    for work in works:
        if work.arrives == step:
            work.id = loop.add(work.timed())
        elif work.aborted == step:
            loop.abort(work.id)
            for event in loop.take_events():
                work.outcome.add(event)
    unsplit = dict.fromkeys(loop.runners, 0)  # tokens beyond one of each sequence that may not be split
    for run in [*loop.scheduler.running, *loop.scheduler.waiting]:
        for feed in run.feeds or run.request.strategy.begin(run.request)[1]:
            unsplit[feed.model] += len(feed.tokens) - 1 if run.started or feed.rows == "all" else 0
    passes = {name: counted(runner) for name, runner in loop.runners.items()}
    for event in loop.step():
        work = next(work for work in works if work.id == event.request_id)
        work.outcome.add(event)
    budget = loop.scheduler.limits.max_batched_tokens
    for name, counts in passes.items():
        assert sum(map(sum, counts)) <= budget + unsplit[name] + (budget // 8 if unsplit[name] else 0)
        del loop.runners[name].forward  # the counting one
    check_books(loop)


def run_workload(engine: Engine, seed: int, monkeypatch: pytest.MonkeyPatch, *, count: int, prefix_cache: bool) -> int:
    """Run random requests in a small cache, checking the books after every step. Returns the number of preemptions."""
    rng = np.random.default_rng(seed)
    works = random_works(engine, rng, list(rng.permutation(list(STRATEGIES))[:6]), count)
    budget, headroom = int(rng.choice([8, 16, 40])), int(rng.choice([0, 4, 16]))
    pages = max(pages_needed(engine, work.request) for work in works) + int(rng.choice([0, 2, 8]))
    size = int(rng.choice([5, 8]))
    loop = loop_on(engine, pages, size=size, budget=budget, headroom=headroom, prefix_cache=prefix_cache)
    alone_with_room = [alone(engine, work.request) for work in works]
    bound = 0
    for work, (_, steps) in zip(works, alone_with_room, strict=True):
        # the first request advances in each step: what it takes alone, and as much again to be recomputed
        positions = len(work.request.prompt_ids) + work.request.max_new_tokens
        bound += steps + 2 * (1 + positions * work.request.strategy.max_sequences // max(1, budget // 8))
    step = 0
    monkeypatch.setattr(time, "monotonic", lambda: step)
    while loop.busy or any(work.id < 0 for work in works):
        advance(loop, works, step)
        step += 1
        assert step <= bound + 20, "something waits for ever"
    for work, (expected, _) in zip(works, alone_with_room, strict=True):
        check_outcome(work, expected)
    assert all(runner.cache.free_pages == runner.cache.num_pages for runner in loop.runners.values())
    return loop.stats.preemptions


@pytest.mark.slow
def test_a_random_workload_keeps_its_books(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_workload(engine, 1, monkeypatch, count=8, prefix_cache=True) > 0


SEEDS = (2, 4, 5, 21)
"""Among their workloads are requests of every kind"""


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.slow if n in SEEDS else pytest.mark.exhaustive) for n in range(2, 26)]
)
def test_random_workloads_keep_their_books(engine: Engine, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_workload(engine, seed, monkeypatch, count=24, prefix_cache=bool(seed % 2))
