"""The one meaning of "same tokens" in fp32.

BLAS rounds differently at different batch sizes, by about 1e-6. So two ways to the same tokens agree when they are the
same, or when at the first difference the two candidates lie within 1e-4 of each other in the reference's scores; of a
drawn token, when the uniform number lies within 1e-5 of the boundary between the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from minillm.engine.inspect import Score
from minillm.engine.results import Completion, Generation

SCORES = 1e-4
UNIFORM = 1e-5
LOG_PROBS = 1e-5

ScoresAfter = Callable[[list[int]], np.ndarray]
"""The scores [V] that the reference chooses from after the tokens generated so far."""


def assert_same_tokens(ours: Sequence[int], reference: Sequence[int], scores_after: ScoresAfter) -> None:
    """Both chose the likeliest token each time."""
    i = first_difference(ours, reference)
    if i is not None:
        scores = scores_after(list(reference[:i]))
        gap = abs(float(scores[ours[i]]) - float(scores[reference[i]]))
        assert gap <= SCORES, f"token {i} is {ours[i]}, expected {reference[i]}: their scores are {gap:.2e} apart"


def assert_same_draws(
    ours: Sequence[int], reference: Sequence[int], scores_after: ScoresAfter, uniform_at: Callable[[int], float]
) -> None:
    """Both drew each token by inverse CDF from softmax(scores), with `uniform_at` the index of the token."""
    i = first_difference(ours, reference)
    if i is not None:
        distance = boundary_distance(scores_after(list(reference[:i])), uniform_at(i), ours[i], reference[i])
        assert distance <= UNIFORM, f"token {i} is {ours[i]}, expected {reference[i]}: {distance:.2e} from a boundary"


def boundary_distance(scores: np.ndarray, u: float, a: int, b: int) -> float:
    """How far `u` lies from the boundary between tokens a and b; infinity where they are no neighbours."""
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores[order].astype(np.float64) - scores.max())
    edges = np.cumsum(weights) / weights.sum()
    ranks = sorted(int(np.flatnonzero(order == token)[0]) for token in (a, b))
    return abs(float(edges[ranks[0]]) - u) if ranks[1] - ranks[0] == 1 else np.inf


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """Where two lines part; None if nowhere. One that merely ends before the other fails."""
    for i, (a, b) in enumerate(zip(ours, reference, strict=False)):
        if a != b:
            return i
    assert len(ours) == len(reference), f"{len(ours)} tokens, expected {len(reference)}"
    return None


def assert_same_results(ours: Any, expected: Any) -> None:
    """The same generations, scores, arrays or lists of them; log-probabilities and other numbers within 1e-5."""
    assert type(ours) is type(expected)
    if isinstance(expected, float):
        assert abs(ours - expected) <= LOG_PROBS, f"{ours}, expected {expected}"
    elif isinstance(expected, list | tuple):
        assert len(ours) == len(expected)
        for a, b in zip(ours, expected, strict=True):
            assert_same_results(a, b)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=LOG_PROBS)
    elif isinstance(expected, Generation | Completion | Score):
        for field in fields(expected):
            if field.compare:
                assert_same_results(getattr(ours, field.name), getattr(expected, field.name))
    else:
        assert ours == expected
