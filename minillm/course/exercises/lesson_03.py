"""Exercises of lesson 3: decoding by hand."""

from typing import Any

import numpy as np

from . import Answer, compare

EXERCISES = ("greedy", "log_probabilities")


def greedy(answer: Answer) -> str | None:
    """The loop, with a model that counts upward from its last token."""

    def forward(ids: list[int]) -> Any:
        logits = np.zeros((len(ids), 10))
        logits[np.arange(len(ids)), [(token + 1) % 10 for token in ids]] = 1
        return logits

    given = [5, 3]
    problem = compare(
        "With a model that counts, greedy(forward, [5, 3], end=7, most=9)", answer(forward, given, 7, 9), [4, 5, 6, 7]
    )
    if problem is None and given != [5, 3]:
        return "It changes the list that it was given: copy it first."
    return problem or compare("greedy(forward, [5, 3], end=7, most=2)", answer(forward, [5, 3], 7, 2), [4, 5])


def log_probabilities(answer: Answer) -> str | None:
    """Log-softmax of each row, at the next token."""
    logits = np.array([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
    value = answer(logits, [0, 1, 2])
    if value is None:
        return "It returns None: write the function's body."
    if np.shape(value) != (2,):
        return f"Three tokens should give 2 numbers, found {[*np.shape(value)]}."
    expected = [2 - np.log(np.exp(2) + 2), -np.log(np.exp(1) + 2)]
    if np.allclose(value, expected):
        return None
    own = [0 - np.log(np.exp(2) + 2), -np.log(np.exp(1) + 2)]
    if np.allclose(value, own):
        return "It takes each row at the row's own token: row i says what stands at i + 1."
    if np.allclose(value, np.exp(expected)):
        return "These are probabilities: take their logarithms."
    return f"It should be {np.round(expected, 3)}, found {np.round(value, 3)}."
