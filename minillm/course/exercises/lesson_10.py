"""Exercises of lesson 10: looking inside."""

import numpy as np

from . import Answer, compare

EXERCISES = ("without", "read_off")


def without(answer: Answer) -> str | None:
    """A hook that zeroes one head."""
    z = np.ones((3, 4, 2))
    hook = answer(2)
    if hook is None:
        return "It returns None: return a function of z and place."
    value = hook(z, None)
    if value is None:
        return "The hook returns None, which leaves the rows as they are: return z."
    expected = np.ones((3, 4, 2))
    expected[:, 2] = 0
    if np.array_equal(value, expected):
        return None
    return "Head 2 of every token should be 0, and the others as they were: z is [T, H, D]."


def read_off(answer: Answer) -> str | None:
    """Final norm, then the head."""
    row, gain, bias = np.array([1.0, 3.0, 2.0]), np.array([1.0, 0.1, 1.0]), np.array([0.0, 0.0, 4.0])
    value = answer(row, gain, bias, np.eye(3))
    problem = compare("A row, a gain and a bias for three tokens", None if value is None else int(value), 2)
    if problem is not None and value is not None:
        return "Is the row normalised (mean 0, variance 1), times the gain, plus the bias, before the product?"
    return problem or compare("The same with a bias of 0", int(answer(row, gain, 0 * bias, np.eye(3))), 1)
