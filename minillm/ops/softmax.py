"""Softmax over the last axis."""

from typing import Any


def softmax(x: Any, xp: Any, out: Any | None = None) -> Any:
    """exp(x - max) / sum over the last axis."""
    y = xp.subtract(x, x.max(axis=-1, keepdims=True), out=out)
    xp.exp(y, out=y)
    y /= y.sum(axis=-1, keepdims=True)
    return y
