"""Exercises of lesson 9: continuous batching."""

from . import Answer, compare

EXERCISES = ("waiting_steps", "continuous_steps")


def waiting_steps(answer: Answer) -> str | None:
    """The longest of each batch."""
    problem = compare("waiting_steps([4, 16, 6, 8, 5, 7], 3)", answer([4, 16, 6, 8, 5, 7], 3), 24)
    return problem or compare("waiting_steps([2, 3, 5], 2)", answer([2, 3, 5], 2), 8)


def continuous_steps(answer: Answer) -> str | None:
    """Places that are taken again."""
    value = answer([4, 16, 6, 8, 5, 7], 3)
    if value == 16 and answer([9, 9, 9, 9], 1) == 9:
        return "The longest request is not all: with one place, four requests of 9 tokens take 36 steps."
    problem = compare("continuous_steps([4, 16, 6, 8, 5, 7], 3)", value, 18)
    problem = problem or compare("continuous_steps([9, 9, 9, 9], 1)", answer([9, 9, 9, 9], 1), 36)
    return problem or compare("continuous_steps([2, 3, 5], 2)", answer([2, 3, 5], 2), 7)
