"""Exercises of lesson 1: tokens and embeddings."""

import numpy as np

from . import Answer, plain

EXERCISES = ("embed", "nearest")


def embed(answer: Answer) -> str | None:
    """Rows of both tables."""
    table, positions = np.arange(20.0).reshape(10, 2), 100 * np.arange(16.0).reshape(8, 2)
    for start in (0, 3):
        value = answer([7, 1, 7], table, positions, start)
        if value is None:
            return "It returns None: write the function's body."
        expected = np.array([table[token] + positions[start + i] for i, token in enumerate((7, 1, 7))])
        if np.shape(value) != expected.shape:
            return f"3 tokens and a table [10, 2] should give [3, 2], found {[*np.shape(value)]}."
        if not np.allclose(value, expected):
            where = "at position `start`" if start else "at position 0"
            i = int(np.argmin(np.isclose(value, expected).all(axis=1)))  # the first row that differs
            return f"The first token stands {where}: row {i} should be {expected[i]}, found {np.asarray(value)[i]}."
    return None


def nearest(answer: Answer) -> str | None:
    """Tokens by cosine."""
    table = np.array([[1.0, 0.0], [9.0, 9.0], [2.0, 0.1], [0.0, 1.0], [-5.0, 0.0]])
    value = answer(table, 0, 2)
    if value is None:
        return "It returns None: write the function's body."
    if 0 in value:
        return "Token 0 itself is among its neighbours: leave it out, wherever it stands in the order."
    if [*value] == [1, 2]:
        return "Row 1 comes first, because it is long: divide each row by its length."
    return None if [*value] == [2, 1] else f"The two nearest of token 0 should be [2, 1], found {plain(value)}."
