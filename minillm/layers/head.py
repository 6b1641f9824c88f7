"""The language model head: from a hidden state a logit for each token of the vocabulary."""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight


@dataclass(frozen=True, eq=False)
class LMHead:
    """logits = x W_lm, scaled or capped in some families; x is projected to the embedding's width if that differs."""

    weight: Weight
    """[V, W]; often the token embedding itself (tied)"""
    project_out: Weight | None = None
    """[W, E]; None if W = E"""
    scale: float = 1.0
    """Factor of logits (Granite)"""
    cap: float | None = None
    """Soft cap c of logits, c tanh(logits / c) (Gemma 2); None: no cap"""

    def states(self, backend: Backend, x: Any) -> Any:
        """Input of the product with `weight`. [R, E] -> [R, W]"""
        return x if self.project_out is None else backend.linear(x, self.project_out)  # [R, E] -> [R, W]

    def __call__(self, backend: Backend, states: Any) -> Any:
        """Logits of each row. [R, W] -> [R, V]"""
        logits = backend.linear(states, self.weight)  # [R, W] -> [R, V]
        if self.scale == 1 and self.cap is None:
            return logits
        return backend.scale_logits(logits, self.scale, self.cap)
