"""Timing: whose time is whose, by a clock that only the backend moves; numbers and counts stay as they are."""

from itertools import pairwise
from typing import Any

import numpy as np

from minillm.backends.numpy import NumpyBackend
from minillm.backends.observe import CountingBackend
from minillm.backends.timing import Call, TimingBackend
from minillm.backends.token_sampler import TokenSampler
from minillm.batch import TokenSequence
from minillm.cache import PagedCache
from minillm.runner.runner import Runner

from ..tiny import runner_of, tiny_model


class Hand:
    """A clock that stands still until it is moved, as a stand-in for a device's events."""

    def __init__(self) -> None:
        self.now = 100

    def mark(self) -> int:
        return self.now

    def seconds(self, began: int, ended: int) -> float:
        return ended - began


class Slow(NumpyBackend):
    """Takes 7 for a product with fc1, 5 for attention, 3 for argmax, 2 for the check of logits, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = self.memory.clock = Hand()
        self.sampler = SlowSampler(self.clock)

    def linear(self, x: Any, weight: Any, **options: Any) -> Any:
        self.clock.now += 7 * weight.name.endswith("fc1")
        return super().linear(x, weight, **options)

    def attend(self, *arguments: Any, **options: Any) -> Any:
        result = super().attend(*arguments, **options)
        self.clock.now += 5
        return result


class SlowSampler(TokenSampler):
    def __init__(self, clock: Hand) -> None:
        super().__init__()
        self.clock = clock

    def argmax(self, logits: Any) -> Any:
        self.clock.now += 3
        return super().argmax(logits)

    def finite(self, logits: Any) -> bool:
        self.clock.now += 2
        return super().finite(logits)


def watched(backend: Any, line: list[int]) -> tuple[np.ndarray, list[Call]]:
    """The logits of a prompt's last token, and the calls of that forward pass and of the choice after it."""
    model = tiny_model("untied", seed=2)
    timing = TimingBackend(backend)
    runner = Runner(model, timing, PagedCache(model.config, timing, 4))
    start = timing.clock.mark()
    logits = runner.prefill(TokenSequence(line)).logits
    timing.sampler.argmax(logits)
    return logits.copy(), timing.take(start)


def test_times_are_found_where_they_were_spent() -> None:
    _, calls = watched(Slow(), [3, 4, 5])
    assert [(call.name, call.layer, call.began, call.seconds) for call in calls if call.seconds] == [
        ("attend", 0, 0, 5),
        ("linear fc1", 0, 5, 7),
        ("attend", 1, 12, 5),
        ("linear fc1", 1, 17, 7),
        ("finite", None, 24, 2),
        ("argmax", None, 26, 3),
    ]


def test_the_numbers_stay_the_same_and_the_costs_are_those_counted() -> None:
    line = [3, 4, 5, 6]
    logits, calls = watched(NumpyBackend(), line)
    model = tiny_model("untied", seed=2)
    counting = CountingBackend(NumpyBackend())
    runner = Runner(model, counting, PagedCache(model.config, counting, 4))
    np.testing.assert_allclose(logits, runner.prefill(TokenSequence(line)).logits, rtol=1e-4, atol=1e-5)
    sums: dict[tuple[str, int | None], Any] = {}
    for call in calls:
        if call.cost is not None:
            key = call.operation, call.layer
            sums[key] = sums[key] + call.cost if key in sums else call.cost
    assert sums == counting.costs
    assert {call.operation for call in calls if call.cost is None} == {"upload", "finite", "argmax"}


def test_calls_are_taken_once_and_in_their_order() -> None:
    timing = TimingBackend(NumpyBackend())
    runner = runner_of(tiny_model(), backend=timing)
    start = timing.clock.mark()
    runner.prefill(TokenSequence([3, 4]))
    calls = timing.take(start)
    assert timing.take(start) == []
    assert calls[0].began >= 0
    assert all(a.ended <= b.began for a, b in pairwise(calls))
    assert all(call.seconds >= 0 for call in calls)
