"""Layer norm and RMS norm of each row."""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """Scales to mean 0 and variance 1, then applies gain and bias (Ba et al., arXiv 1607.06450)."""

    weight: Weight
    """Gain and bias, [E] each, or neither"""
    epsilon: float
    """Added to the variance, against division by zero"""

    def __call__(self, backend: Backend, x: Any) -> Any:
        """[T, E] -> [T, E]"""
        return backend.layer_norm(x, self.weight, self.epsilon)


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """Scales to mean square 1, then applies a gain (Zhang and Sennrich, arXiv 1910.07467)."""

    weight: Weight
    """[E]"""
    epsilon: float
    """Added to the mean square, against division by zero"""

    def __call__(self, backend: Backend, x: Any, residual: Any | None = None) -> Any:
        """norm(x), plus the residual if there is one. [T, E] -> [T, E]"""
        return backend.rms_norm(x, self.weight, self.epsilon, residual=residual)


Norm = LayerNorm | RMSNorm
