"""Answers to the exercises of lesson 12."""

from typing import Any

import numpy as np


def mlp_shares(x: Any, up: Any, down: Any, n: int) -> list[Any]:
    """[T, E], [F, E], [E, F] -> n x [T, E]"""
    parts = np.split(np.arange(len(up)), n)
    return [np.maximum(x @ up[part].T, 0) @ down[:, part].T for part in parts]


def bubble(S: int, M: int) -> float:
    """Each stage works M of M + S - 1 turns."""
    return (S - 1) / (M + S - 1)
