"""Steps that run ahead of the host: the same answers as without, whatever comes between them, and no page is lost.

The backend is NumPy's, with a memory that launches steps ahead as a GPU does; `backends/cuda/test_ahead.py` has the
emulated one.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minillm.backends.memory import Memory
from minillm.backends.numpy import NumpyBackend
from minillm.backends.recording import DecodeStep, TokensRead
from minillm.batch import Batch, Span
from minillm.decoding.continuation import TextStream
from minillm.decoding.event import Event
from minillm.decoding.stats import Stats
from minillm.decoding.strategy import Request
from minillm.engine.loop import StepLoop
from minillm.errors import CacheFullError, NumericalError
from minillm.reference.philox import Keys
from minillm.runner.runner import Runner

from ..tiny import loop_of, request_for, runner_of, tiny_model


class AheadMemory(Memory):
    """Computes a step when it is launched, and shows its tokens when they are read."""

    runs_ahead = True
    page_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.launched = self.under_way = 0
        self._last: Any = None

    def upload(self, batch: Batch, rows: Any) -> tuple[Batch, Any]:
        self._last = None
        return super().upload(batch, rows)

    def launch(self, owner: Any, step: DecodeStep) -> TokensRead | None:
        last, P = self._last, self.page_size
        if last is None and step.token_ids.min() < 0:
            return None
        assert self.under_way < 2
        ids = [one if one >= 0 else last[-1 - one] for one in step.token_ids.tolist()]
        at = step.positions
        spans = tuple(
            Span(i, i + 1, p + 1, p + 1, tuple(step.pages[i, : p // P + 1].tolist())) for i, p in enumerate(at)
        )
        held = [span.pages[-1] for span in spans]
        assert len(set(held)) == len(held), "two sequences write to one page"
        batch = Batch(np.array(ids), at, np.array(held), at % P, spans)
        output, finite = owner._run(owner.backend, batch, range(len(at)))
        draws = step.draws
        filters = {name: draws[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        tokens = None
        if finite:
            keys = Keys(draws["seed"], draws["sequence"].astype(np.int64), draws["position"].astype(np.int64))
            tokens = owner.backend.sampler.sample(output.logits.copy(), keys, **filters)
        self._last = np.zeros(len(at), np.int64) if tokens is None else tokens
        self.launched += 1
        self.under_way += 1

        def read() -> Any:
            self.under_way -= 1
            return tokens

        return read


def ahead_runner(*, pages: int = 200) -> Runner:
    backend = NumpyBackend()
    backend.memory = AheadMemory()
    backend.memory.activations = NumpyBackend().memory.activations
    backend.xp = backend.memory.xp
    return runner_of(tiny_model(seed=2, backend=backend), backend=backend, pages=pages, page_size=4)


class Answer:
    """What a user is told of a request."""

    def __init__(self, n: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.reasons: list[str | None] = [None] * n
        self.finished = 0


def serve(
    loop: StepLoop, arrivals: list[tuple[int, Request]], aborts: dict[int, int] | None = None
) -> dict[int, Answer]:
    """Run requests that arrive, and are aborted, before a step of a given number. Returns answers by their indices."""
    answers: dict[int, Answer] = {}
    numbers: dict[int, int] = {}
    waiting, step = sorted(enumerate(arrivals), key=lambda one: one[1][0]), 0

    def take(events: list[Event]) -> None:
        for event in events:
            answer = answers[numbers[event.request_id]]
            answer.tokens[event.index] += event.token_ids
            answer.reasons[event.index] = event.finish_reason
            answer.finished += event.request_finished

    while waiting or loop.busy:
        while waiting and waiting[0][1][0] <= step:
            number, (_, request) = waiting.pop(0)
            try:
                request_id = loop.add(request)
            except CacheFullError:  # too large for so few pages, either way
                continue
            numbers[request_id], answers[number] = number, Answer(request.settings.num_return_sequences)
        for request_id in [one for one, number in numbers.items() if (aborts or {}).get(number) == step]:
            loop.abort(request_id)
            take(loop.take_events())
        take(loop.step())
        step += 1
    return answers


KINDS: list[dict[str, Any]] = [
    {},
    {},
    {},
    {"do_sample": True, "top_k": 20, "top_p": 0.9},
    {"do_sample": True, "temperature": 1.5, "top_k": 0, "min_p": 0.02},
    {"do_sample": True, "num_return_sequences": 3, "top_k": 0},
    {"repetition_penalty": 1.3},
    {"logprobs": True},
    {"num_beams": 2},
    {"use_cache": False},
    {"prompt_lookup_num_tokens": 2},
]


def workload(seed: int, *, plain: bool) -> tuple[list[tuple[int, Request]], dict[int, int]]:
    """Requests of many kinds, some with beginnings in common, and which of them are aborted when."""
    choose = random.Random(seed)
    beginnings = [[choose.randrange(3, 96) for _ in range(choose.randrange(1, 14))] for _ in range(3)]
    arrivals, aborts, at = [], {}, 0
    for i in range(choose.randrange(3, 12)):
        at += choose.choice([0, 0, 0, 1, 2, 7, 15])
        prompt = [*choose.choice(beginnings), *(choose.randrange(3, 96) for _ in range(choose.randrange(4)))]
        fields = KINDS[choose.randrange(6 if plain else len(KINDS))]
        fields = fields | ({"seed": seed + i} if "do_sample" in fields else {})
        eos = choose.sample(range(3, 96), choose.choice([0, 2, 6]))
        arrivals.append((at, request_for(prompt, max_new_tokens=choose.randrange(1, 24), eos_token_id=eos, **fields)))
        if choose.random() < 0.15:
            aborts[i] = at + choose.randrange(1, 12)
    return arrivals, aborts


def assert_same_answers(ours: dict[int, Answer], theirs: dict[int, Answer], aborted: set[int]) -> None:
    for number, expected in theirs.items():
        answer = ours[number]
        assert answer.finished == expected.finished == 1
        for i, (tokens, others) in enumerate(zip(answer.tokens, expected.tokens, strict=True)):
            if number in aborted:  # at some step: what there was by then
                common = min(len(tokens), len(others))
                assert tokens[:common] == others[:common]
            else:
                assert (tokens, answer.reasons[i]) == (others, expected.reasons[i])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "plain", "pages", "prefix"),
    [
        (range(4), True, 200, True),
        pytest.param(range(10, 16), True, 200, True, marks=pytest.mark.slow),
        pytest.param(range(100, 110), True, 200, False, marks=pytest.mark.slow),
        pytest.param(range(300, 315), False, 200, True, marks=pytest.mark.slow),
        pytest.param(range(500, 515), True, 16, True, marks=pytest.mark.slow),
        pytest.param(range(700, 715), False, 16, False, marks=pytest.mark.slow),
        pytest.param(range(16, 50), True, 200, True, marks=pytest.mark.exhaustive),
        pytest.param(range(110, 140), True, 200, False, marks=pytest.mark.exhaustive),
        pytest.param(range(315, 340), False, 200, True, marks=pytest.mark.exhaustive),
        pytest.param(range(515, 560), True, 16, True, marks=pytest.mark.exhaustive),
        pytest.param(range(715, 760), False, 16, False, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: f"{value.start}-{value.stop}" if isinstance(value, range) else str(value),
)
def test_random_workloads_have_the_answers_of_the_ordinary_way(
    seeds: range, plain: bool, pages: int, prefix: bool
) -> None:
    """Arrivals, ends, aborts, preemptions and twins between the steps; afterwards every page is free."""
    runner, launched, preemptions = ahead_runner(pages=pages), 0, 0
    memory: Any = runner.backend.memory
    for seed in seeds:
        arrivals, aborts = workload(seed, plain=plain)
        answers = []
        for ahead in (False, True):
            memory.runs_ahead, memory.under_way = ahead, 0
            runner.cache.clear()
            loop = loop_of(target=runner, max_batch_size=4, headroom=0, prefix_cache=prefix)
            answers.append(serve(loop, arrivals, aborts))
            assert runner.cache.free_pages == pages
            assert not any(runner.cache.owners(page) for page in range(pages))
        assert_same_answers(answers[1], answers[0], set(aborts))
        launched += memory.launched
        preemptions += loop.stats.preemptions
    assert launched > 5 * len(seeds)
    assert preemptions or pages > 16


def steps_of(runner: Runner, requests: list[Request]) -> tuple[dict[int, Answer], Stats, int]:
    """Answers, statistics and the number of steps launched ahead."""
    memory: Any = runner.backend.memory
    before = memory.launched
    loop = loop_of(target=runner, prefix_cache=True)
    answers = serve(loop, [(0, request) for request in requests])
    return answers, loop.stats, memory.launched - before


def test_the_last_token_is_foreseen_and_an_early_end_costs_one_row() -> None:
    runner = ahead_runner()
    _, stats, launched = steps_of(runner, [request_for([5, 6, 7], max_new_tokens=9)])
    assert (stats.steps, launched) == (9, 8), "the prompt's pass, and a step for each further token"
    [answer] = steps_of(runner, [request_for([5, 6, 7], max_new_tokens=9)])[0].values()
    eos = answer.tokens[0][4]
    first = answer.tokens[0].index(eos)
    answers, stats, launched = steps_of(runner, [request_for([5, 6, 7], max_new_tokens=9, eos_token_id=[eos])])
    assert answers[0].tokens == [answer.tokens[0][: first + 1]]
    assert answers[0].reasons == ["stop"]
    assert (stats.steps, launched) == (first + 1, first + 1), "one step that nobody reads"
    assert stats.decode_tokens == first


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": True}, {"repetition_penalty": 1.2}, {"num_beams": 2}, {"use_cache": False}, {"mirostat": 2}],
    ids=str,
)
def test_requests_whose_logits_somebody_sees_go_the_ordinary_way(fields: dict[str, Any]) -> None:
    fields = fields | ({"do_sample": True} if "mirostat" in fields else {})
    assert steps_of(ahead_runner(), [request_for([5, 6, 7], max_new_tokens=6, **fields)])[2] == 0


def test_who_comes_later_waits_for_the_step_under_way_alone() -> None:
    runner = ahead_runner()
    loop = loop_of(target=runner)
    first, second = request_for([5, 6, 7], max_new_tokens=20), request_for([8, 9], max_new_tokens=20)
    loop.add(first)
    for _ in range(4):
        loop.step()
    late = loop.add(second)
    assert late not in {event.request_id for event in loop.step()}, "this step was launched before"
    assert late in {event.request_id for event in loop.step()}


def test_another_pass_in_between_does_no_harm() -> None:
    """A step that was launched may be followed by one that has nothing to do with it, of a score for example."""
    runner = ahead_runner()
    expected = serve(loop_of(target=runner), [(0, request_for([5, 6, 7], max_new_tokens=9))])[0].tokens
    loop = loop_of(target=runner)
    loop.add(request_for([5, 6, 7], max_new_tokens=9))
    tokens: list[int] = []
    from minillm.engine.inspect import next_tokens

    while loop.busy:
        tokens += [token for event in loop.step() for token in event.token_ids]
        next_tokens(runner, [9, 8, 7], 3)
    assert [tokens] == expected


def test_nan_ends_its_request_alone() -> None:
    """It is found when the step is read; the requests are then computed again, apart."""
    runner = ahead_runner()
    model: Any = runner.model
    model.embedding.positions.data[14] = np.nan
    requests = [(0, request_for([5, 6, 7], max_new_tokens=6)), (0, request_for([9] * 8, max_new_tokens=9))]
    loop = loop_of(target=runner)
    ids = [loop.add(request) for _, request in requests]
    tokens: dict[int, int] = dict.fromkeys(ids, 0)
    errors: dict[int, Any] = {}
    while loop.busy:
        for event in loop.step():
            tokens[event.request_id] += len(event.token_ids)
            errors[event.request_id] = event.error
    assert errors[ids[0]] is None and tokens[ids[0]] == 6
    assert isinstance(errors[ids[1]], NumericalError) and tokens[ids[1]] < 9
    assert runner.cache.free_pages == runner.cache.num_pages


def test_text_that_cannot_be_decoded_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Decoder:
        def push(self, token_id: int) -> str:
            pushed.append(token_id)
            if len(pushed) == 4:
                raise ValueError("no text")
            return "x"

        def flush(self) -> str:
            return ""

    pushed: list[int] = []
    runner = ahead_runner()
    broken, other = request_for([5, 6, 7], max_new_tokens=9), request_for([5, 6, 8], max_new_tokens=9)
    broken = replace(broken, text_stream=lambda: TextStream(Decoder()))
    answers = steps_of(runner, [broken, other])[0]
    assert answers[0].reasons == ["error"]
    assert (answers[1].reasons, len(answers[1].tokens[0])) == (["length"], 9)
    assert runner.cache.free_pages == runner.cache.num_pages


def test_an_interrupted_step_forgets_what_is_under_way() -> None:
    runner = ahead_runner()
    loop = loop_of(target=runner)
    request = request_for([5, 6, 7], max_new_tokens=9)
    loop.add(request)
    for _ in range(3):
        loop.step()
    assert runner.backend.memory.under_way == 1  # type: ignore[attr-defined]
    loop.reset()
    assert [event.finish_reason for event in loop.step()] == ["error"]
    assert not loop.busy
    assert runner.cache.free_pages == runner.cache.num_pages
