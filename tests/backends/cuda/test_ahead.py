"""Steps that run ahead on the emulated GPU, which works as late as it may: the answers are those without."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.batches import known_ids
from minillm.backends.cuda.kernels import Kernels, Launcher
from minillm.runner.runner import Runner
from tests.engine.test_ahead import assert_same_answers, serve, workload
from tests.tiny import loop_of, request_for, runner_of, tiny_model

from .launchers import exhaustive
from .recording import Launch, Recorder, RecordingDevice


class LateRecorder(Recorder):
    """A launcher whose launches run when somebody waits."""

    def __init__(self, inner: Launcher) -> None:
        super().__init__(inner)
        self.queue: list[Callable[[], None]] = []

    def run(self, launch: Launch) -> None:
        self.queue.append(lambda: Recorder.run(self, launch))


class LateDevice(RecordingDevice):
    """Copies and launches happen in their order, and only when somebody waits for them: what the host changes too early
    or reads too early shows.
    """

    recorder: LateRecorder

    def __init__(self, recorder: LateRecorder) -> None:
        super().__init__(recorder)
        self.done = self.ahead = 0
        self.most_ahead = 0

    def send(self, source: Any, target: Any, offset: int = 0) -> None:
        self.recorder.queue.append(lambda: RecordingDevice.send(self, source, target, offset))

    def fetch(self, source: Any, target: Any) -> None:
        self.recorder.queue.append(lambda: RecordingDevice.fetch(self, source, target))

    def wait(self) -> None:
        super().wait()
        self.mark()()

    def mark(self) -> Callable[[], None]:
        until = self.done + len(self.recorder.queue)

        def wait() -> None:
            while self.done < until:
                self.done += 1
                self.recorder.queue.pop(0)()

        return wait


@pytest.fixture
def late(emulator: Launcher, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(Kernels, "processors", 1)
    device = LateDevice(LateRecorder(emulator))
    backend = CudaBackend(device, device.recorder, "float32", max_batch_size=4)
    return runner_of(tiny_model(seed=2, backend=backend), backend=backend, pages=24)


def count_launches(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step that was to be launched ahead was."""
    launched: list[bool] = []
    launch = runner.backend.memory.launch

    def counting(*arguments: Any) -> Any:
        read = launch(*arguments)
        launched.append(read is not None)
        return read

    monkeypatch.setattr(runner.backend.memory, "launch", counting)
    return launched


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(3), exhaustive(range(3, 8))])
def test_random_workloads_have_the_answers_of_the_ordinary_way(
    seeds: range, late: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, launched = late.backend.memory, count_launches(late, monkeypatch)
    for seed in seeds:
        arrivals, aborts = workload(seed, plain=True)
        answers = []
        for ahead in (False, True):
            monkeypatch.setattr(memory, "runs_ahead", ahead)
            late.cache.clear()
            answers.append(serve(loop_of(target=late, max_batch_size=4, prefix_cache=True), arrivals, aborts))
            assert late.cache.free_pages == 24
        assert_same_answers(answers[1], answers[0], set(aborts))
    assert sum(launched) > 5 * len(seeds)


@pytest.mark.slow
def test_two_steps_are_under_way_and_neither_waits_for_the_other(late: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, launched = loop_of(target=late), count_launches(late, monkeypatch)
    for prompt in ([5, 6, 7], [8, 9]):
        request = request_for(prompt, max_new_tokens=14)
        loop.add(request)
    for _ in range(4):  # the prompts, a plain step, one that is recorded, and the first of those read late
        loop.step()
    device: Any = late.backend.device  # type: ignore[attr-defined]
    waits = device.waits
    for _ in range(6):
        assert device.recorder.queue, "a step is under way between two steps of the loop"
        device.reserved.clear()
        before = len(launched)
        assert [len(event.token_ids) for event in loop.step()] == [1, 1]
        assert launched[before:] == [True]
        assert not device.reserved
    assert device.waits == waits, "for a step's tokens alone, never for all that is queued"


@pytest.mark.slow
def test_a_device_that_is_done_at_once(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step's tokens are copied to the host before it has read those of the step before."""
    backend = CudaBackend(device, device.recorder, "float32", max_batch_size=4)
    runner = runner_of(tiny_model(seed=2, backend=backend), backend=backend, pages=24)
    launched, answers = count_launches(runner, monkeypatch), []
    for ahead in (False, True):
        monkeypatch.setattr(backend.memory, "runs_ahead", ahead)
        requests = [request_for([5, 6, 7], max_new_tokens=14), request_for([8, 9], max_new_tokens=11)]
        answers.append(serve(loop_of(target=runner), [(0, request) for request in requests]))
    assert_same_answers(answers[1], answers[0], set())
    assert sum(launched) > 8


@pytest.mark.slow
def test_ids_that_stand_for_tokens_of_the_step_before(any_emulator: Launcher) -> None:
    ids, chosen = np.array([7, -3, 0, -1, 95], np.int32), np.array([11, 12, 13], np.int32)
    known_ids(Kernels(any_emulator), ids, chosen)
    assert ids.tolist() == [7, 13, 0, 11, 95]
    many = -1 - np.arange(700, dtype=np.int32)[::-1].copy()
    known_ids(Kernels(any_emulator), many, np.arange(1000, 1700, dtype=np.int32))
    assert many.tolist() == [*range(1699, 999, -1)]
