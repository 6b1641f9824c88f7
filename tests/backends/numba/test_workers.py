"""The workers of a program: helpers sleep when idle, and the caller runs alone where they do not help."""

import threading
import time
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

numba = pytest.importorskip("numba", reason="the compiled kernels need numba: pip install 'minillm[fast]'")

from minillm.backends.numba import workers  # noqa: E402
from minillm.backends.numba.arguments import address_of, vector  # noqa: E402
from minillm.backends.numba.compiling import shared_kernel  # noqa: E402
from minillm.backends.numba.workers import COUNTERS  # noqa: E402

two = pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="Numba was started with one thread")


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[workers._Team]:
    """One without helpers yet."""
    monkeypatch.setattr(workers, "_team", workers._Team())
    yield workers._team


@cache
def adding() -> int:
    """workers[share] = 1 + worker; and sums[share] = 1 + 2 + ... + many"""
    return shared_kernel(numba.types.int64)(_add)


def _add(arguments, data, share, shares, worker):
    who, sums, many = vector(arguments, 0, np.int64), vector(arguments, 2, np.int64), arguments[4]
    total = 0
    for i in range(many):
        total += (i * i + total) % 7
    who[share], sums[share] = 1 + worker, total


def run(shares: int = 8, many: int = 1000, launches: int = 5) -> list[int]:
    """Which workers did the shares of a program's last launch."""
    who, sums = np.zeros(shares, np.int64), np.zeros(shares, np.int64)
    arguments = np.array([address_of(who), shares, address_of(sums), shares, many], np.int64)
    rows = np.array([[adding(), address_of(arguments), address_of(who), shares]] * launches, np.int64)
    workers.run(rows, np.empty((launches, COUNTERS), np.int64), watched=False, workers=2)
    assert (who > 0).all() and len(set(sums.tolist())) == 1
    return [int(worker) for worker in who]


def helps(team: workers._Team) -> bool:
    """Whether a helper turns up for long programs, soon or late: the system may be slow to start it."""
    return any(2 in run(shares=64, many=20_000) for _ in range(200))


@two
def test_a_helper_turns_up_again_after_it_has_slept(team: workers._Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_LATE", 1 << 60)  # whatever else this machine does
    assert helps(team)
    for _ in range(3):
        [helper] = team._helpers
        while not helper._asleep:
            time.sleep(0.001)
        assert helps(team)
    assert len(team._helpers) == 1


@two
def test_a_helper_without_work_takes_no_time_of_the_processor(team: workers._Team) -> None:
    run()
    [helper] = team._helpers
    while not helper._asleep:
        time.sleep(0.001)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


@two
def test_after_a_long_wait_programs_run_alone_for_a_while(team: workers._Team, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(workers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(workers, "_LATE", 0)  # every program waits too long
    pauses = []
    for _ in range(7):
        run()
        pauses.append(team._alone_until - now[0])
        assert run(shares=64, many=20_000) == [1] * 64
        now[0] = team._alone_until
    assert pauses == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 0.64])
    monkeypatch.setattr(workers, "_LATE", 1 << 60)
    for _ in range(5):  # half each time
        run()
    assert team._alone_for == pytest.approx(workers._SHORTEST)


@two
def test_programs_of_another_thread_run_alone_meanwhile(team: workers._Team) -> None:
    with team._held:
        done: list[list[int]] = []
        thread = threading.Thread(target=lambda: done.append(run()))
        thread.start()
        thread.join()
    assert done == [[1] * 8] and not team._helpers


@two
def test_without_threads_of_the_system_the_caller_works_alone(
    team: workers._Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert run() == [1] * 8
