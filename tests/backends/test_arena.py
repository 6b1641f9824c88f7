"""The arena reuses buffers, but never while they may still be read."""

import numpy as np

from minillm.backends.memory import Arena
from minillm.batch import TokenSequence

from ..tiny import tiny_runner


def test_the_same_calls_get_the_same_memory() -> None:
    """Layers share what they take, apart from the last result of each, for which there are two places."""
    arena = Arena(np)

    def steps() -> list[int]:
        addresses = []
        arena.restart()
        for _ in range(4):
            arena.turn()
            addresses += [arena.take(shape).ctypes.data for shape in [(4, 8), (4, 16)]]
        return addresses

    first = steps()
    small, one, other = first[0], first[1], first[3]
    assert len({small, one, other}) == 3
    assert first == [small, one, small, other, small, one, small, other]
    assert steps() == first
    assert arena.nbytes == 4 * (4 * 8 + 2 * 4 * 16)


def test_the_last_result_of_a_layer_outlives_one_turn_whatever_the_next_one_takes() -> None:
    for count in range(1, 6):  # results of the layer before
        arena = Arena(np)
        arena.turn()
        results = [arena.take((3,)) for _ in range(count)]
        x = results[-1]
        x[:] = 7
        arena.turn()
        taken = [arena.take((3,)) for _ in range(6)]
        for array in taken:
            array[:] = 8
        assert x.tolist() == [7, 7, 7]
        assert len({array.ctypes.data for array in taken}) == 6
        arena.turn()
        assert any(np.shares_memory(arena.take((3,)), x) for _ in range(6))


def test_a_layer_without_results_hands_on_what_it_was_given() -> None:
    arena = Arena(np)
    x = arena.take((3,))
    arena.turn()
    arena.turn()
    assert not np.shares_memory(arena.take((3,)), x)


def test_buffers_grow_and_serve_smaller_shapes() -> None:
    arena = Arena(np)
    for shape in [(2, 3), (5, 3), (1, 3)]:
        arena.restart()
        assert arena.take(shape).shape == shape
    assert arena.nbytes == 4 * 15


def test_a_decode_step_takes_no_more_memory_than_the_one_before() -> None:
    runner = tiny_runner(seed=2)
    sequence = TokenSequence(list(range(3, 20)))
    runner.prefill(sequence)
    held = []
    for token in range(20, 30):
        sequence.token_ids.append(token)
        runner.decode([sequence])
        held.append(runner.backend.memory.arena.nbytes)
    assert len(set(held[2:])) == 1


def test_a_step_that_begins_anew_gets_the_same_memory_whatever_ran_before() -> None:
    arena = Arena(np)

    def step() -> list[int]:
        arena.restart()
        addresses = [arena.take((2, 8)).ctypes.data]
        for _ in range(3):
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


def test_what_is_for_the_pass_outlives_all_turns_and_leaves_the_last_result_alone() -> None:
    arena = Arena(np)
    for _ in range(2):  # each step in the memory of the one before
        arena.restart()
        x = arena.take((3,))
        with arena.for_pass():
            stay = [arena.take((3,)), arena.take((5,))]
        assert not np.shares_memory(*stay)
        arena.turn()
        assert not np.shares_memory(arena.take((3,)), x)
        for _ in range(3):
            arena.turn()
            taken = [arena.take((5,)) for _ in range(4)]
            assert not any(np.shares_memory(each, kept) for each in taken for kept in stay)
    assert arena.nbytes == 4 * (3 + 5 + 3 + 5 + 4 * 5)
