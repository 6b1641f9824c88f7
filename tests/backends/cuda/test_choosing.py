"""A step's tokens come back in the one copy that the host waits for, and never those of another step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.observe import counting
from minillm.backends.token_sampler import TokenSampler
from minillm.batch import TokenSequence
from minillm.decoding.strategy import Request
from minillm.reference.philox import Keys
from minillm.reference.sampling import Draw, sample
from minillm.runner.runner import Runner
from tests.tiny import loop_of, random_prompts, request_for, run, runner_of, tiny_model, tiny_runner

from .recording import RecordingDevice

PROMPTS = random_prompts(6, seed=3)
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture
def runner(device: RecordingDevice) -> Runner:
    """With each step read before the next one is launched."""
    backend = CudaBackend(device, device.recorder, "float32", max_batch_size=8)
    backend.memory.runs_ahead = False
    return runner_of(tiny_model(seed=2, backend=backend), backend=backend)


def tokens_and_waits(
    runner: Runner, device: RecordingDevice, requests: Sequence[Request]
) -> tuple[list[Any], list[int]]:
    """Each request's tokens, by continuation, and how often the host waited in each step."""
    loop = loop_of(target=runner)
    tokens: dict[int, list[list[int]]] = {
        loop.add(request): [[] for _ in range(request.settings.num_return_sequences)] for request in requests
    }
    waits = []
    while loop.busy:
        before = device.waits
        for event in loop.step():
            tokens[event.request_id][event.index] += event.token_ids
        waits.append(device.waits - before)
    return list(tokens.values()), waits


def numpys(requests: Sequence[Request]) -> list[Any]:
    return [[result.token_ids for result in results] for results in run(loop_of(target=tiny_runner(seed=2)), requests)]


# --- one wait ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_of_requests_that_choose_in_many_ways_waits_once(runner: Runner, device: RecordingDevice) -> None:
    """Settings, seeds and lengths differ, and requests that share a strategy are not neighbours."""

    def requests() -> list[Request]:
        ways: list[dict[str, Any]] = [
            {"do_sample": True, "seed": 1, **PLAIN, "temperature": 0.7, "top_k": 12},
            {},
            {"do_sample": True, "seed": 2**63 + 9, **PLAIN, "temperature": 0.7, "top_k": 12},
            {"do_sample": True, "seed": 3, **PLAIN, "temperature": 1.5, "top_p": 0.8, "min_p": 0.05},
            {},
            {"do_sample": True, "seed": 1, **PLAIN, "temperature": 0.7, "top_k": 12},
        ]
        lengths = [6, 9, 7, 12, 5, 10]
        return [request_for(*one, max_new_tokens=n, **way) for *one, n, way in zip(PROMPTS, lengths, ways, strict=True)]

    tokens, waits = tokens_and_waits(runner, device, requests())
    assert tokens == numpys(requests())
    assert waits == [1] * 12
    assert max(device.fetched) <= 4 * 8 * 4, "ids and flags, and no logits"
    assert device.replays >= 4, "recorded steps are among them"


@pytest.mark.slow
def test_a_prompt_with_several_continuations_is_drawn_from_apart(runner: Runner, device: RecordingDevice) -> None:
    def requests() -> list[Request]:
        several = {"do_sample": True, "seed": 5, "num_return_sequences": 3, **PLAIN}
        return [request_for(PROMPTS[0], max_new_tokens=6, **several), request_for(PROMPTS[1], max_new_tokens=6)]

    tokens, waits = tokens_and_waits(runner, device, requests())
    assert tokens == numpys(requests())
    assert waits == [2, 1, 1, 1, 1, 1], "after the prompt three draws are made from copies of one row"


def test_a_sampled_step_reserves_nothing_and_launches_its_draws_behind_what_is_recorded(
    runner: Runner, device: RecordingDevice
) -> None:
    loop = loop_of(target=runner)
    for prompt, seed in zip(PROMPTS[:3], (4, 5, 6), strict=True):
        request = request_for(prompt, max_new_tokens=8, do_sample=True, seed=seed, **PLAIN)
        loop.add(request)
    for _ in range(3):
        loop.step()
    for _ in range(4):
        device.recorder.launches.clear()
        device.reserved.clear()
        loop.step()
        names = [launch.name for launch in device.recorder.launches]
        assert names[-5:] == ["best_of_chunks", "take_best", "best_of_chunks", "count_scores", "draw"]
        assert names.count("draw") == 1
        assert [launch.name for launch in device.records[-1]] == names[:-3]
        assert not device.reserved


# --- never another's token --------------------------------------------------------------------------------------------


def draws_of(rows: int) -> list[Draw | None]:
    """Row by row."""
    return [Draw(0.9, 40, 0.95, 0.01, seed=7 + row, sequence=row, position=20) for row in range(rows)]


def ask(runner: Runner, logits: Any, draws: Sequence[Any]) -> list[int]:
    """`TokenSampler.sample` for draws whose filters are alike."""
    keys = Keys(
        np.array([draw.seed for draw in draws], np.uint64),
        np.array([draw.sequence for draw in draws]),
        np.array([draw.position for draw in draws]),
    )
    filters = {name: getattr(draws[0], name) for name in PLAIN}
    tokens: list[int] = runner.backend.sampler.sample(logits, keys, **filters).tolist()
    expected = sample(np.array(logits), keys.uniforms(), **filters, xp=np).tolist()
    assert tokens == expected
    return tokens


@pytest.fixture
def step(runner: Runner, device: RecordingDevice) -> Callable[..., Any]:
    """Runs decode steps of six sequences; each is recorded from the third on."""
    sequences = [TokenSequence(list(prompt)) for prompt in PROMPTS]
    for sequence in sequences:
        runner.prefill(sequence)

    def one(draws: Sequence[Draw | None] = (), token: int = 5) -> Any:
        for sequence in sequences:
            sequence.token_ids.append(token)
        return runner.forward(sequences, [1] * 6, draws=draws).logits

    for token in (8, 9):
        one(token=token)
    return one


def test_draws_that_were_told_are_made_when_they_are_asked_for(
    runner: Runner, device: RecordingDevice, step: Callable[..., Any]
) -> None:
    draws = draws_of(6)
    logits = step(draws)
    assert device.replays, "the step was recorded"
    waits, launches = device.waits, len(device.recorder.launches)
    tokens = ask(runner, logits, draws)
    assert ask(runner, logits[2:5], draws[2:5]) == tokens[2:5]
    np.testing.assert_array_equal(runner.backend.sampler.argmax(logits), logits.argmax(-1))
    assert (device.waits, len(device.recorder.launches)) == (waits, launches)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 3.0},
        {"seed": 99},
        {"top_k": 1},
        {"top_p": 0.05},
        {"min_p": 0.9},
        {"sequence": 9},
        {"position": 21},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_draw_that_is_not_the_one_that_was_told_is_made_anew(
    change: dict[str, Any], runner: Runner, step: Callable[..., Any]
) -> None:
    told: list[Any] = draws_of(6)
    logits = step(told)
    asked = [draw._replace(**change) for draw in told]
    assert ask(runner, logits, asked) != ask(runner, logits, told)


@pytest.mark.slow
def test_draws_from_other_logits_are_made_anew(runner: Runner, step: Callable[..., Any]) -> None:
    """Of the next step, which lie where the last ones did; of a copy; of other rows; of rows that were not told."""
    draws = draws_of(6)
    first = ask(runner, step(draws), draws)
    logits = step(token=6)
    assert ask(runner, logits, draws) != first
    logits = step(draws, token=7)
    tokens = ask(runner, logits, draws)
    assert ask(runner, np.flip(logits, 0).copy(), draws) != tokens
    assert ask(runner, logits[3:], draws[:3]) != tokens[:3]
    logits = step([None, *draws[1:3], None, *draws[4:]], token=8)
    assert ask(runner, logits, draws) != tokens


def test_a_pass_that_is_looked_at_makes_no_use_of_the_draws_before(runner: Runner) -> None:
    """Such a pass is not told of draws, and its logits lie where the last ones did."""
    draws = draws_of(6)

    def tokens_after(line: list[int]) -> list[int]:
        logits = runner.forward([TokenSequence(line)], [len(line)], rows=range(6), draws=draws).logits
        return ask(runner, logits, draws)

    line = random_prompts(1, seed=1)[0][:8]
    before = tokens_after(line)
    with counting(runner):
        assert tokens_after(line[::-1]) != before


# --- what is no number, and what is not allowed -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_none_is_named_before_a_drawn_token_is_used(
    bad: float, runner: Runner, device: RecordingDevice
) -> None:
    """The weight goes bad behind a recorded step; among sampled requests, whose draws would take some token."""
    loop = loop_of(target=runner)
    for prompt in PROMPTS[:2]:
        request = request_for(prompt, max_new_tokens=9, do_sample=True, seed=4, **PLAIN)
        loop.add(request)
    for _ in range(4):
        loop.step()
    assert device.replays
    replays = device.replays
    model: Any = runner.model
    model.layers[1].mlp.up.data[3, 4] = bad
    events = loop.step()
    assert device.replays > replays
    failed = [event for event in events if event.error is not None]
    assert failed  # of infinity ReLU makes 0 in a row where it is negative
    for event in failed:
        assert event.token_ids == ()
        assert "NaN or infinity in layer 1, made by linear" in str(event.error)


class Allow:
    """A guide to which two tokens are all there is."""

    words = 4

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0
        mask[1] = 1 << 8 | 1 << 9

    def push(self, token_id: int) -> None:
        assert token_id in (40, 41)


@pytest.mark.parametrize("way", [{}, {"do_sample": True, "seed": 4, **PLAIN}], ids=["greedy", "sampled"])
def test_a_guide_is_followed_and_others_are_not_led(way: dict[str, Any], runner: Runner) -> None:
    def requests() -> list[Request]:
        made = [request_for(prompt, max_new_tokens=6, **way) for prompt in PROMPTS[:2]]
        return [replace(made[0], guide=Allow), made[1]]  # type: ignore[arg-type]  # all that is asked of a guide here

    results = run(loop_of(target=runner), requests())
    tokens = [[result.token_ids for result in each] for each in results]
    assert tokens == numpys(requests())
    assert set(tokens[0][0]) <= {40, 41}
    assert not set(tokens[1][0]) <= {40, 41}


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [0, 1, 7])
def test_log_probabilities_come_from_the_device_and_are_the_references(top: int, runner: Runner) -> None:
    logits = np.random.default_rng(3).integers(-40, 40, (5, 300)).astype(np.float32) / 8  # with ties
    tokens = np.array([0, 7, 299, 100, 5])
    found = runner.backend.sampler.log_probs(runner.backend.xp.asarray(logits), tokens, top)
    expected = TokenSampler().log_probs(logits, tokens, top)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.chosen, expected.chosen, rtol=1e-6)
    np.testing.assert_allclose(found.top, expected.top, rtol=1e-6)
