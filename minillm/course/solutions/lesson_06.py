"""Answers to the exercises of lesson 6."""

from typing import Any

import numpy as np


def top_p(p: Any, mass: float) -> Any:
    """[V] -> [V]"""
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]  # of the likelier ones together
    masked = np.zeros_like(p)
    chosen = order[before < mass]
    masked[chosen] = p[chosen]
    return masked / masked.sum()


def draw(p: Any, u: float) -> int:
    """[V] -> an index"""
    order = np.argsort(-p)
    return int(order[np.searchsorted(np.cumsum(p[order]), u)])
