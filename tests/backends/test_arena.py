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
