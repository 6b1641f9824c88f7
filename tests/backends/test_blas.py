"""BLAS is limited to one thread while other work slows its products down, and released afterwards."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from minillm.backends import numpy as numpy_backend
from minillm.backends.numpy import BlasLimit, NumpyBackend, Watch
from minillm.backends.operations import Backend


def threads() -> list[int]:
    return [library.num_threads for library in ThreadpoolController().select(user_api="blas").lib_controllers]


class Clocks:
    """Time that passes, and the part of it that a thread has been given."""

    def __init__(self) -> None:
        self.passed = self.given = 50.0

    def pass_by(self, seconds: float, *, given: float = 1.0) -> None:
        self.passed += seconds
        self.given += seconds * given


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    clocks = Clocks()
    for name, value in (("monotonic", "passed"), ("perf_counter", "passed"), ("thread_time", "given")):
        monkeypatch.setattr(time, name, lambda value=value: getattr(clocks, value))
    monkeypatch.setattr(numpy_backend.sys, "platform", "linux")
    yield clocks


class Limit(BlasLimit):
    """Counts how many have asked."""

    asked = 0

    def ask(self) -> None:
        self.asked += 1

    def release(self) -> None:
        self.asked -= 1


def product(watch: Watch, clocks: Clocks, *, given: float) -> None:
    """A product of 10 ms."""
    backend = NumpyBackend()
    backend._watch = watch
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Backend, "linear", lambda *arguments, **options: clocks.pass_by(0.01, given=given))
        backend.linear(None, None)  # type: ignore[arg-type]


def limited_products(watch: Watch, limit: Limit, clocks: Clocks, products: int, *, given: float) -> list[bool]:
    """Which of a pass's products, of 10 ms each, run on one thread."""
    found = []
    with watch.forward_pass():
        for _ in range(products):
            found.append(bool(limit.asked))
            product(watch, clocks, given=given)
    assert not limit.asked  # between passes BLAS has its threads
    return found


def test_a_product_that_loses_time_puts_those_after_it_on_one_thread(clocks: Clocks) -> None:
    limit = Limit()
    watch = Watch(limit)
    assert limited_products(watch, limit, clocks, 3, given=1.0) == [False] * 3
    assert limited_products(watch, limit, clocks, 3, given=0.5) == [False, True, True]
    assert limited_products(watch, limit, clocks, 3, given=0.5) == [True] * 3
    clocks.pass_by(0.1)
    assert limited_products(watch, limit, clocks, 2, given=0.5) == [False, True]  # tried again
    clocks.pass_by(0.15)
    assert limited_products(watch, limit, clocks, 2, given=0.5) == [True, True]  # for twice as long
    clocks.pass_by(1)
    assert limited_products(watch, limit, clocks, 9, given=1.0) == [False] * 9
    assert limited_products(watch, limit, clocks, 2, given=0.5) == [False, True]
    clocks.pass_by(0.1)
    assert limited_products(watch, limit, clocks, 1, given=1.0) == [False]  # for as long as at first


def test_a_product_outside_a_pass_changes_nothing(clocks: Clocks) -> None:
    limit = Limit()
    product(Watch(limit), clocks, given=0)
    assert not limit.asked


def test_a_pass_that_fails_gives_blas_its_threads_back(clocks: Clocks) -> None:
    limit = Limit()
    watch = Watch(limit)
    with pytest.raises(ZeroDivisionError), watch.forward_pass():
        product(watch, clocks, given=0)
        assert limit.asked == 1
        _ = 1 / 0
    assert not limit.asked


def test_the_last_who_asked_gives_blas_its_threads_back() -> None:
    before, limit = threads(), BlasLimit()
    if not before:
        pytest.skip("threadpoolctl knows no BLAS here")
    limit.ask()
    limit.ask()
    assert set(threads()) == {1}
    np.ones((64, 64)) @ np.ones((64, 64))
    limit.release()
    assert set(threads()) == {1}
    limit.release()
    assert threads() == before
