"""Exercises of lesson 11: numbers of few bits."""

import numpy as np

from . import Answer, compare

EXERCISES = ("to_int8", "bytes_of")


def to_int8(answer: Answer) -> str | None:
    """Scale and integers."""
    group = np.array([0.5, -2.0, 0.013, 1.0])
    value = answer(group.copy())
    if value is None:
        return "It returns None: write the function's body."
    scale, integers = value
    if not np.isclose(scale, 2 / 127):
        return f"The scale of [0.5, -2.0, 0.013, 1.0] should be 2 / 127 = {2 / 127:.5f}, found {scale:.5f}."
    if np.any(np.asarray(integers) != np.rint(integers)):
        return "The integers are not whole: round them."
    return compare("The integers", np.asarray(integers).astype(int).tolist(), [32, -127, 1, 64])


def bytes_of(answer: Answer) -> str | None:
    """Integers and scales."""
    value = answer(768, 192, 4, 32)
    if value == 768 * 192 // 2:
        return "These are the integers alone: each group has a scale of 2 bytes besides."
    problem = compare("bytes_of(768, 192, 4, 32)", value, 768 * 192 // 2 + 2 * 768 * 6)
    return problem or compare("bytes_of(2, 64, 8, 64)", answer(2, 64, 8, 64), 132)
