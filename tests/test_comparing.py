"""The comparator of tokens: what it accepts and what it rejects."""

import numpy as np
import pytest

from .comparing import assert_same_draws, assert_same_tokens


def after(*scores: float):
    return lambda prefix: np.array(scores, np.float32)


def test_the_same_tokens_pass_without_a_look_at_the_scores() -> None:
    assert_same_tokens([1, 2], [1, 2], scores_after=None)


def test_a_tie_passes_and_anything_may_follow_it() -> None:
    assert_same_tokens([1, 0, 2, 2], [1, 2, 0], after(3.0, 0.0, 3.00009))


@pytest.mark.parametrize("ours", [[1, 1, 0], [1, 0, 0], [1, 2], [1, 2, 0, 0]])
def test_other_tokens_and_other_lengths_fail(ours: list[int]) -> None:
    with pytest.raises(AssertionError):
        assert_same_tokens(ours, [1, 2, 0], after(3.0, 0.0, 3.0002))


def test_the_scores_are_asked_for_the_prefix_of_the_reference() -> None:
    asked = []
    with pytest.raises(AssertionError, match="token 2 is 9, expected 7"):
        assert_same_tokens([5, 6, 9], [5, 6, 7], lambda prefix: (asked.append(prefix), np.arange(10.0))[1])
    assert asked == [[5, 6]]


@pytest.mark.parametrize(("u", "passes"), [(0.5, True), (0.500009, True), (0.50002, False), (0.4, False)])
def test_a_draw_at_the_boundary_passes(u: float, passes: bool) -> None:
    scores = after(*np.log([0.2, 0.5, 0.3]))  # in order: 1, 2, 0
    if passes:
        assert_same_draws([1], [2], scores, lambda i: u)
    else:
        with pytest.raises(AssertionError):
            assert_same_draws([1], [2], scores, lambda i: u)


def test_tokens_that_are_no_neighbours_fail() -> None:
    with pytest.raises(AssertionError):
        assert_same_draws([1], [0], after(*np.log([0.2, 0.5, 0.3])), lambda i: 0.5)
