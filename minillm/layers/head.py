"""The language model head: a logit for each token of the vocabulary from a hidden state."""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight


@dataclass(frozen=True, eq=False)
class LMHead:
    """logits = x W_lm, projected to the embedding's width first if that is narrower."""

    weight: Weight
    """[V, W]; often the token embedding itself (tied)"""
    project_out: Weight | None = None
    """[W, E]; None if W = E"""

    def states(self, backend: Backend, x: Any) -> Any:
        """Input of the product with `weight`. [R, E] -> [R, W]"""
        return x if self.project_out is None else backend.linear(x, self.project_out)  # [R, E] -> [R, W]

    def __call__(self, backend: Backend, states: Any) -> Any:
        """Logits of each row. [R, W] -> [R, V]"""
        return backend.linear(states, self.weight)  # [R, W] -> [R, V]
