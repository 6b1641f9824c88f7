"""Kernels in shares: each share is done once, and a program's kernels one after the other, on any number of workers."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

numba = pytest.importorskip("numba", reason="the compiled kernels need numba: pip install 'minillm[fast]'")

from minillm.backends.numba import launching  # noqa: E402
from minillm.backends.numba.arguments import Rows, matrix, number, row_at, share_of, vector  # noqa: E402
from minillm.backends.numba.compiling import num_threads, set_threads, shared_kernel  # noqa: E402
from minillm.backends.numba.launching import Program, launch, recording, rows_of, scratch, shares_of  # noqa: E402


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = num_threads()
    if request.param > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("Numba was started with fewer threads")
    set_threads(request.param)
    yield request.param
    set_threads(before)


@cache
def counting() -> int:
    """counts[share] += 1"""
    return shared_kernel(numba.types.int64)(_count)


def _count(arguments, data, share, shares, worker):
    counts = numba.carray(data, (arguments[1],))
    counts[share] += 1


@cache
def turning() -> int:
    """out = factor * x, backwards: a share of one launch needs another share of the launch before."""
    return shared_kernel(numba.types.float32)(_turn)


def _turn(arguments, data, share, shares, worker):
    x, out, factor = vector(arguments, 0, np.float32), vector(arguments, 2, np.float32), number(arguments[4])
    first, stop = share_of(len(x), share, shares)
    for i in range(first, stop):
        out[i] = np.float32(factor) * x[len(x) - 1 - i]


@pytest.mark.parametrize("shares", [1, 2, 7, 64])
def test_every_share_is_done_once(threads: int, shares: int) -> None:
    counts = np.zeros(shares, np.int64)
    for _ in range(50):
        launch(counting(), counts, shares=shares)
    assert (counts == 50).all()


def test_shares_of_a_size_make_it_up() -> None:
    for size in (0, 1, 5, 24, 1000):
        for shares in (1, 2, 7):
            pieces = [share_of.py_func(size, share, shares) for share in range(shares)]
            assert [i for first, stop in pieces for i in range(first, stop)] == list(range(size))
    assert [stop - first for first, stop in (share_of.py_func(32, share, 4) for share in range(4))] == [14, 10, 6, 2]


def test_a_program_runs_its_launches_in_order_and_on_what_is_in_the_arrays_then(threads: int) -> None:
    x, y, z = (np.zeros(4096, np.float32) for _ in range(3))
    program = Program()
    with recording(program):
        for _ in range(20):
            launch(turning(), x, y, 2.0, shares=8)
            launch(turning(), y, z, 0.5, shares=8)
            launch(turning(), z, x, 1.0, shares=5)
            launch(turning(), x, z, 1.0, shares=3)
            launch(turning(), z, x, 1.0, shares=4)
    assert len(program) == 100 and program.complete
    rng = np.random.default_rng(3)
    for _ in range(30):
        given = rng.standard_normal(4096).astype(np.float32)
        x[:] = given
        program.run()
        assert np.array_equal(x, given)  # turned 100 times, doubled and halved 20 times


def test_a_program_ends_where_fewer_workers_turn_up_than_it_counts_on() -> None:
    """As where the system gives a process fewer threads than were asked for."""
    counts = np.zeros(6, np.int64)
    program = Program()
    program.workers = 64
    with recording(program):
        launch(counting(), counts, shares=6)
        launch(counting(), counts, shares=6)
    program.run()
    assert (counts == 4).all()


def test_while_nothing_records_nothing_is_kept() -> None:
    counts, program = np.zeros(1, np.int64), Program()
    with recording(program):
        pass
    launch(counting(), counts)
    assert not len(program)


@cache
def echoing() -> int:
    return shared_kernel(numba.types.float32)(_echo)


def _echo(arguments, data, share, shares, worker):
    out, x, whole, real = matrix(arguments, 0, np.float32), matrix(arguments, 4, np.float32), arguments[8], arguments[9]
    names = vector(arguments, 14, np.int64)
    for t in range(len(x)):
        row = row_at(arguments, 10, t)
        for i in range(len(row)):
            out[t, i] = x[t, i] * whole + np.float32(number(real)) * row[i] + names[t]


def test_arguments_arrive() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 8)).astype(np.float32)
    apart = rng.standard_normal((3, 6, 4)).astype(np.float32)[:, 2:4]  # [T, heads, D]: rows lie 24 numbers apart
    out, names = np.empty((3, 8), np.float32), np.arange(3)
    launch(echoing(), out, x, 3, 0.25, rows_of(apart), names)
    assert np.allclose(out, 3 * x + 0.25 * apart.reshape(3, 8) + names[:, None], rtol=1e-6)


def test_heads_that_do_not_lie_together_are_copied_and_a_program_is_told() -> None:
    heads = np.zeros((3, 4, 6), np.float32)
    program = Program()
    with recording(program):
        rows_of(heads[:, 1:3])
        assert program.complete
        assert rows_of(heads[:, :, :4]).array.shape == (3, 16)
    assert not program.complete


def test_there_are_some_shares_for_each_worker_but_no_more_than_pieces(threads: int) -> None:
    assert shares_of(1) == 1 and shares_of(3) == min(3, shares_of(1000))
    assert shares_of(1000) == threads * launching._SHARES_A_WORKER


def test_an_array_that_is_not_contiguous_is_refused() -> None:
    x = np.zeros((4, 6), np.float32)
    for array in (x[:, :3], x.T, Rows(x[:, ::2])):
        with pytest.raises(AssertionError, match=r"contiguous|one piece"):
            launch(counting(), np.zeros(1, np.int64), array)
    launch(counting(), np.zeros(1, np.int64), Rows(x[:, :3]))


def test_programs_work_in_memory_of_their_own() -> None:
    """Two that one thread recorded may run on two threads at once."""
    programs = Program(), Program()
    places = [scratch().take("x", 8, np.float32)]
    for program in programs:
        with recording(program):
            places.append(scratch().take("x", 8, np.float32))
            assert scratch().take("x", 8, np.float32) is places[-1]
    assert len({id(place) for place in places}) == 3
    assert scratch().take("x", 8, np.float32) is places[0]
