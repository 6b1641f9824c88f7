"""Exercises of lesson 7: beams and speculation."""

import numpy as np

from . import Answer, compare, plain

EXERCISES = ("beam_step", "acceptance")


def beam_step(answer: Answer) -> str | None:
    """The best continuations of all beams."""
    scores, log_probs = np.array([-1.0, -3.0]), np.array([[-0.5, -4.0, -9.0], [-0.1, -0.2, -9.0]])
    value = answer(scores, log_probs, 3)
    if value is None:
        return "It returns None: write the function's body."
    pairs = [(int(beam), int(token)) for beam, token in value]
    if pairs == [(1, 0), (1, 1), (0, 0)]:
        return "It compares the tokens alone: add each beam's own score."
    return compare("Beams of -1 and -3: the three best", pairs, [(0, 0), (1, 0), (1, 1)])


def acceptance(answer: Answer) -> str | None:
    """The sum of min(p, q)."""
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.2, 0.3, 0.3])
    value = answer(p, q)
    if value is None:
        return "It returns None: write the function's body."
    if np.ndim(value):
        return f"It should be one number, found {plain(value)}: sum over the tokens."
    if not np.isclose(value, 0.6):
        return f"With the lesson's p and q it should be 0.6, found {value:.3f}: x is guessed with q(x), then kept."
    return None if np.isclose(answer(p, p), 1) else "A draft that is the model itself is always right: it should be 1."
