"""Answers to the exercises of lesson 10."""

from collections.abc import Callable
from typing import Any

import numpy as np


def without(head: int) -> Callable[[Any, Any], Any]:
    """A hook at `attention.z`."""

    def hook(z: Any, place: Any) -> Any:
        z[:, head] = 0
        return z

    return hook


def read_off(row: Any, gain: Any, bias: Any, table: Any) -> int:
    """[E] -> a token"""
    normed = (row - row.mean()) / np.sqrt(row.var() + 1e-5) * gain + bias
    return int((table @ normed).argmax())
