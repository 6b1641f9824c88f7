"""The language model head: from a hidden state to a score (logit) for each token of the vocabulary."""

from dataclasses import dataclass
from typing import Any

from ..backends.base import Backend
from ..backends.weights import Weight


@dataclass(frozen=True, eq=False)
class LMHead:
    """logits = x W_lm, through a narrower width where the embedding has one."""

    weight: Weight
    """[V, W]; often the token embedding itself (tied)"""
    project_out: Weight | None = None
    """[W, E]; None where W = E"""

    def states(self, backend: Backend, x: Any) -> Any:
        """What the weight multiplies. [R, E] -> [R, W]"""
        return x if self.project_out is None else backend.linear(x, self.project_out)  # [R, E] -> [R, W]

    def __call__(self, backend: Backend, states: Any) -> Any:
        """Logits of each row. [R, W] -> [R, V]"""
        return backend.linear(states, self.weight)  # [R, W] -> [R, V]
