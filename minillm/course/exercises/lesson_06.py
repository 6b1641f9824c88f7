"""Exercises of lesson 6: from logits to tokens."""

import numpy as np

from . import Answer, compare

EXERCISES = ("top_p", "draw")


def top_p(answer: Answer) -> str | None:
    """The fewest likeliest that reach the mass."""
    p = np.array([0.1, 0.5, 0.15, 0.25])
    value = answer(p.copy(), 0.7)
    if value is None:
        return "It returns None: write the function's body."
    if np.allclose(value, [0, 0.5, 0, 0.25]):
        return "What is left should sum to 1: divide by the sum."
    if np.allclose(value, [0, 1, 0, 0]):
        return "0.5 alone does not reach 0.7: the token that crosses the mass is kept too."
    if not np.allclose(value, [0, 2 / 3, 0, 1 / 3]):
        return f"top_p([0.1, 0.5, 0.15, 0.25], 0.7) should be [0, 0.667, 0, 0.333], found {np.round(value, 3)}."
    whole = answer(p.copy(), 1.0)
    return None if np.allclose(whole, p) else "A mass of 1 should keep every token."


def draw(answer: Answer) -> str | None:
    """Inverse of the cumulative distribution."""
    p = np.array([0.2, 0.5, 0.3])
    for u, expected in ((0.1, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 0), (0.999, 0)):
        if (problem := compare(f"draw([0.2, 0.5, 0.3], {u})", answer(p, u), expected)) is not None:
            return f"{problem} The likeliest token, 1, has the numbers up to 0.5."
    return None
