"""Timing on a device: by its events, and with the costs that are counted there."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm.backends.clock import HostClock
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.device import Device, EventClock
from minillm.backends.observe import CountingBackend
from minillm.backends.timing import TimingBackend
from minillm.batch import TokenSequence
from minillm.cache import PagedCache
from minillm.reference.cost import Cost
from minillm.runner.runner import Runner
from tests.tiny import tiny_model

from .recording import RecordingDevice


class Stream:
    """Events come to pass at the milliseconds that are given, and only once they are waited for."""

    def __init__(self, *moments: float) -> None:
        self._moments = list(moments)

    def record(self) -> Any:
        event = SimpleNamespace(moment=self._moments.pop(0), done=False)
        event.synchronize = lambda: setattr(event, "done", True)
        return event


def elapsed(began: Any, ended: Any) -> float:
    """As CUDA: an error if the end has not come to pass."""
    assert ended.done
    return float(ended.moment - began.moment)


def test_marks_are_events_and_seconds_wait_for_the_later_one() -> None:
    clock = EventClock(SimpleNamespace(get_elapsed_time=elapsed), Stream(10, 12.5, 13))
    first, second, third = clock.mark(), clock.mark(), clock.mark()
    assert clock.seconds(first, second) == pytest.approx(0.0025)
    assert clock.seconds(first, third) == pytest.approx(0.003)


def test_the_back_end_has_its_devices_clock() -> None:
    device = Device()
    assert isinstance(device.clock, HostClock)
    device.clock = EventClock(None, None)
    assert CudaBackend(device, None).memory.clock is device.clock  # type: ignore[arg-type]


def test_a_prompt_and_a_decode_step_are_the_same_and_cost_what_is_counted(device: RecordingDevice) -> None:
    backend = CudaBackend(device, device.recorder, "float16", max_batch_size=2)
    model = tiny_model(backend=backend)
    plain, counting, timing = backend, CountingBackend(backend), TimingBackend(backend)
    logits = []
    for wrapped in (plain, counting, timing):
        runner, sequence = Runner(model, wrapped, PagedCache(model.config, wrapped, 4)), TokenSequence([3, 4, 5])
        runner.prefill(sequence)
        sequence.token_ids.append(6)
        logits.append(wrapped.sampler.to_host(runner.decode([sequence]).logits).copy())
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], atol=2e-2)  # other kernels where a step is recorded
    calls = timing.take(0)
    assert sum((call.cost for call in calls if call.cost is not None), Cost(0)) == counting.total
    assert all(call.seconds >= 0 for call in calls)
