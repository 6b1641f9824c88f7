"""Answers to the exercises of lesson 3."""

from collections.abc import Callable
from typing import Any

import numpy as np


def greedy(forward: Callable[[list[int]], Any], ids: list[int], end: int, most: int) -> list[int]:
    """New tokens, at most `most`."""
    text = list(ids)
    while len(text) < len(ids) + most and end not in text[len(ids) :]:
        text.append(int(forward(text)[-1].argmax()))
    return text[len(ids) :]


def log_probabilities(logits: Any, ids: list[int]) -> Any:
    """[T, V] -> [T - 1]"""
    highest = logits.max(axis=1, keepdims=True)
    log_probs = logits - highest - np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
    return log_probs[np.arange(len(ids) - 1), ids[1:]]
