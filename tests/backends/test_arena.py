"""Buffers are used again, and never while somebody may still read them."""

import numpy as np

from minillm.backends.arena import Arena
from minillm.batch import Sequence

from ..tiny import tiny_runner


def test_the_same_calls_get_the_same_memory() -> None:
    arena = Arena(np)

    def steps() -> list[int]:
        addresses = []
        for _ in range(2):
            arena.turn()
            addresses += [arena.take(shape).ctypes.data for shape in [(4, 8), (4, 16)]]
        return addresses

    first = steps()
    assert len(set(first)) == 4
    assert steps() == first
    held = arena.nbytes
    steps()
    assert arena.nbytes == held == 2 * 4 * (4 * 8 + 4 * 16)


def test_a_result_outlives_one_turn() -> None:
    arena = Arena(np)
    arena.turn()
    x = arena.take((3,))
    x[:] = 7
    arena.turn()
    arena.take((3,))[:] = 8
    assert x.tolist() == [7, 7, 7]
    arena.turn()
    assert np.shares_memory(arena.take((3,)), x)


def test_buffers_grow_and_serve_smaller_shapes() -> None:
    arena = Arena(np)
    for shape in [(2, 3), (5, 3), (1, 3)]:
        arena.turn()
        arena.turn()
        assert arena.take(shape).shape == shape
    assert arena.nbytes == 4 * 15


def test_a_decode_step_takes_no_more_memory_than_the_one_before() -> None:
    runner = tiny_runner(seed=2)
    sequence = Sequence(list(range(3, 20)))
    runner.prefill(sequence)
    held = []
    for token in range(20, 30):
        sequence.token_ids.append(token)
        runner.decode([sequence])
        held.append(runner.ops.arena.nbytes)
    assert len(set(held[2:])) == 1


def test_a_step_that_begins_anew_gets_the_same_memory_whatever_ran_before() -> None:
    arena = Arena(np)

    def step() -> list[int]:
        arena.restart()
        addresses = [arena.take((2, 8)).ctypes.data]
        for _ in range(3):  # an odd number of layers, which swaps the halves
            arena.turn()
            addresses.append(arena.take((4, 8)).ctypes.data)
        return addresses

    step()
    first, held = step(), arena.nbytes
    assert step() == first
    assert arena.nbytes == held


def test_a_type_of_its_own_takes_its_own_size() -> None:
    arena = Arena(np, np.float16)
    assert arena.take((3, 5)).dtype == np.float16
    logits = arena.take((3, 5), np.float32)
    assert (logits.dtype, arena.nbytes) == (np.float32, 30 + 60)
