"""Whatever changes results keeps its keys and values to itself, and takes over none of others."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.observe import CountingBackend, WrappedBackend, counting, put_between
from minillm.backends.timing import TimingBackend

from ..backends.cuda.launchers import launcher, missing
from ..backends.cuda.recording import Recorder, RecordingDevice
from ..cache.books import check_loop
from ..tiny import loop_of, request_for, runner_of, tiny_model

PROMPT = "A list of colors: red, orange, yellow, green, blue, indigo, violet, and then once more: red, orange,"


class Ablated(WrappedBackend):
    """Sets what attention gives in one layer to zero."""

    layer_off = passes = 0

    def observe(self, operation: str, weight: Any, result: Any, **arguments: Any) -> None:
        self.passes += operation == "embed"
        if operation == "attend" and self.layer == self.layer_off:
            result[...] = 0


class AblatedAndCounted(CountingBackend):
    """An observer of ours whose subclass changes results, and says nothing about it."""

    def observe(self, operation: str, weight: Any, result: Any, **arguments: Any) -> None:
        super().observe(operation, weight, result, **arguments)
        if operation == "attend":
            result[...] = 0


@pytest.fixture(params=["numpy", pytest.param("cpu", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(backend=request.param, cache_bytes=1 << 25)


@cache
def alone(backend: str, layer: int | None) -> Any:
    """The result of an engine that has computed nothing else."""
    engine = Engine(backend=backend, cache_bytes=1 << 25, prefix_cache=False)
    if layer is None:
        return engine.generate(PROMPT, max_new_tokens=8)
    ablated = Ablated(engine.runner.backend)
    ablated.layer_off = layer
    with put_between(engine.runner, ablated):
        return engine.generate(PROMPT, max_new_tokens=8)


def ids(generation: Any) -> list[int]:
    token_ids: list[int] = generation.completions[0].token_ids
    return token_ids


@pytest.mark.longer
def test_a_changed_run_leaves_nothing_to_later_requests(engine: Engine) -> None:
    name = engine.runner.backend.name
    with put_between(engine.runner, Ablated(engine.runner.backend)):
        changed = engine.generate(PROMPT, max_new_tokens=8)
    after = engine.generate(PROMPT, max_new_tokens=8)
    assert ids(changed) == ids(alone(name, 0)) != ids(after)
    assert ids(after) == ids(alone(name, None))
    assert after.cached_tokens == 0
    assert engine.generate(PROMPT, max_new_tokens=8).cached_tokens > 0
    check_loop(engine._driver.loop)


@pytest.mark.slow
def test_a_changed_run_begins_from_nothing_that_was_computed_unchanged(engine: Engine) -> None:
    name = engine.runner.backend.name
    engine.generate(PROMPT, max_new_tokens=8)
    with put_between(engine.runner, Ablated(engine.runner.backend)):
        changed = engine.generate(PROMPT, max_new_tokens=8)
    assert ids(changed) == ids(alone(name, 0))
    assert changed.cached_tokens == 0


@pytest.mark.slow
def test_changes_that_differ_within_one_block_share_nothing_either(engine: Engine) -> None:
    name = engine.runner.backend.name
    with put_between(engine.runner, Ablated(engine.runner.backend)) as ablated:
        for layer in (0, 1):
            ablated.layer_off = layer
            assert ids(engine.generate(PROMPT, max_new_tokens=8)) == ids(alone(name, layer))


@pytest.mark.slow
def test_prompts_of_one_changed_call_are_each_computed(engine: Engine) -> None:
    with put_between(engine.runner, Ablated(engine.runner.backend)):
        results = engine.generate([PROMPT, PROMPT], max_new_tokens=4, num_beams=2)
    assert ids(results[0]) == ids(results[1])
    assert [result.cached_tokens for result in results] == [0, 0]
    check_loop(engine._driver.loop)


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrap", [AblatedAndCounted, lambda inner: CountingBackend(Ablated(inner))])
def test_a_change_under_an_observer_or_in_a_subclass_of_one_is_a_change(engine: Engine, wrap: Any) -> None:
    with put_between(engine.runner, wrap(engine.runner.backend)):
        engine.generate(PROMPT, max_new_tokens=2)
    assert engine.generate(PROMPT, max_new_tokens=2).cached_tokens == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrap", [CountingBackend, TimingBackend])
def test_observers_that_only_look_share_as_ever(engine: Engine, wrap: Any) -> None:
    with put_between(engine.runner, wrap(engine.runner.backend)):
        engine.generate(PROMPT, max_new_tokens=2)
    first = engine.generate(PROMPT, max_new_tokens=2)
    with counting(engine.runner):
        second = engine.generate(PROMPT, max_new_tokens=2)
    assert first.cached_tokens > 0
    assert second.cached_tokens == first.cached_tokens


@pytest.mark.slow
def test_a_request_that_a_change_met_on_its_way_leaves_nothing_of_it(engine: Engine) -> None:
    engine.add(PROMPT, max_new_tokens=30)
    for _ in range(3):
        engine.step()
    with put_between(engine.runner, Ablated(engine.runner.backend)):
        for _ in range(5):
            engine.step()
    tokens: list[int] = []
    while engine.busy:
        tokens += [token for event in engine.step() for token in event.token_ids]
    longer = [*engine.tokenizer.encode(PROMPT), *tokens[:10]]
    after = engine.generate(longer, max_new_tokens=8)
    expected = Engine(backend=engine.runner.backend.name, prefix_cache=False).generate(longer, max_new_tokens=8)
    assert ids(after) == ids(expected)
    assert after.cached_tokens > 0, "the prompt was computed before"
    check_loop(engine._driver.loop)


def assert_same_vectors(one: Any, other: Any) -> None:
    """Equal but for rounding: NumPy's products may be summed by another number of threads."""
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def assert_other_vectors(one: Any, other: Any) -> None:
    assert np.abs(one - other).max() > 0.01


@pytest.mark.slow
def test_vectors_of_texts_are_changed_in_the_block_and_not_after_it(engine: Engine) -> None:
    before = engine.embed(PROMPT)
    with put_between(engine.runner, Ablated(engine.runner.backend)):
        changed = engine.embed(PROMPT)
    after = engine.embed(PROMPT)
    assert_other_vectors(before, changed)
    assert_same_vectors(before, after)


@pytest.mark.slow
def test_vectors_of_the_first_text_embedded_in_a_block_are_not_those_of_later_ones(engine: Engine) -> None:
    with put_between(engine.runner, Ablated(engine.runner.backend)):
        changed = engine.embed(PROMPT)
    fresh = Engine(backend=engine.runner.backend.name)
    assert_same_vectors(engine.embed(PROMPT), fresh.embed(PROMPT))
    assert_other_vectors(changed, engine.embed(PROMPT))


@pytest.mark.slow
def test_steps_launched_ahead_on_a_gpu_end_where_a_change_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing():
        pytest.skip(reason)
    monkeypatch.setattr(Kernels, "processors", 1)
    device = RecordingDevice(Recorder(launcher()))
    backend = CudaBackend(device, device.recorder, "float32", max_batch_size=4)
    runner = runner_of(tiny_model(seed=2, backend=backend), backend=backend)
    loop = loop_of(target=runner)
    request = request_for([5, 6, 7], max_new_tokens=20)
    loop.add(request)
    for _ in range(6):
        loop.step()
    assert loop._pending is not None
    with put_between(runner, Ablated(backend)) as changed:
        for _ in range(5):
            loop.step()
    assert changed.passes == 4, "all but the step that was on its way"
