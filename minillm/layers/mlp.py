"""The MLP of a layer: A = activation(x W1), y = A W2; or gated, A = activation(x W_gate) * (x W_up)."""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight


@dataclass(frozen=True, eq=False)
class MLP:
    """Two projections with an activation between them, row by row."""

    up: Weight
    """[F, E]"""
    down: Weight
    """[E, F]"""
    activation: str

    def __call__(self, backend: Backend, x: Any, residual: Any | None) -> Any:
        """residual + activation(x W1 + b1) W2 + b2. [T, E] -> [T, E]"""
        hidden = backend.linear(x, self.up, activation=self.activation)  # [T, E] -> [T, F]
        return backend.linear_reduced(hidden, self.down, residual)  # [T, F] -> [T, E]


@dataclass(frozen=True, eq=False)
class GatedMLP:
    """Gated MLP: the activated gate projection scales the `up` projection (Shazeer, arXiv 2002.05202)."""

    gate_up: Weight
    """W_gate, W_up stacked, [2 F, E]: one large product is faster than two"""
    down: Weight
    """[E, F]"""
    activation: str
    factors: Weight | None = None
    """[2 F], of the columns of both projections (Falcon-H1); None: 1"""

    def __call__(self, backend: Backend, x: Any, residual: Any | None) -> Any:
        """residual + (activation(x W_gate) * (x W_up)) W_down. [T, E] -> [T, E]"""
        projected = backend.linear(x, self.gate_up)  # [T, E] -> [T, 2 F]
        if self.factors is not None:
            projected = backend.multiply(projected, factor=self.factors)
        hidden = backend.glu(projected, self.activation)  # [T, 2 F] -> [T, F]
        return backend.linear_reduced(hidden, self.down, residual)  # [T, F] -> [T, E]
