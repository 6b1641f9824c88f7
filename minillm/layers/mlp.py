"""The feed-forward part of a layer: A = activation(x W1), y = A W2."""

from dataclasses import dataclass
from typing import Any

from ..backends.base import Backend
from ..backends.weights import Weight


@dataclass(frozen=True, eq=False)
class MLP:
    """Two projections with an activation between them, row by row."""

    up: Weight
    """[F, E]"""
    down: Weight
    """[E, F]"""
    activation: str

    def __call__(self, ops: Backend, x: Any, residual: Any) -> Any:
        """residual + activation(x W1 + b1) W2 + b2. [T, E] -> [T, E]"""
        hidden = ops.linear(x, self.up, activation=self.activation)  # [T, E] -> [T, F]
        return ops.linear(hidden, self.down, residual=residual)  # [T, F] -> [T, E]
