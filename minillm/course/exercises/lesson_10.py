"""Exercises of lesson 10: looking inside."""

import numpy as np

from . import Answer

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
    table = np.array([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])  # [V, E]
    values = answer(row, gain, bias, table), answer(row, gain, 0 * bias, table)
    if values[0] is None:
        return "It returns None: write the function's body."
    if np.ndim(values[0]):
        return f"It should be one token, found an array {[*np.shape(values[0])]}: take the largest score's place."
    if np.array_equal(values, (2, 1)):
        return "This is the largest number of the row: the scores are its products with the table's rows."
    if not np.array_equal(values, (0, 2)):
        return "Is the row normalised (mean 0, variance 1), times the gain, plus the bias, before the product?"
    return None
