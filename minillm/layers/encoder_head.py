"""Heads of models that generate no text: a logit for each label of a classification, or the hidden state itself."""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight
from .embedding import LMHead
from .norm import Norm


@dataclass(frozen=True, eq=False)
class ClassificationHead:
    """A logit for each label; in encoders a projection with an activation comes before, in some with a norm."""

    weight: Weight
    """[labels, W]"""
    dense: Weight | None = None
    """[W, E]; None if the hidden state itself is multiplied"""
    activation: str | None = None
    """Activation after the projection"""
    norm: Norm | None = None
    """Norm after the activation"""

    def states(self, backend: Backend, x: Any) -> Any:
        """Input of the product with `weight`. [R, E] -> [R, W]"""
        if self.dense is not None:
            x = backend.linear(x, self.dense, activation=self.activation)  # [R, E] -> [R, W]
        return x if self.norm is None else self.norm(backend, x)

    def __call__(self, backend: Backend, states: Any) -> Any:
        """Logits of each row. [R, W] -> [R, labels]"""
        return backend.linear(states, self.weight)  # [R, W] -> [R, labels]


@dataclass(frozen=True, eq=False)
class NoHead:
    """In the place of a head, in a model whose hidden states are wanted: texts are embedded by them."""

    project_out: Weight | None = None
    """[W, E]; None if W = E"""

    def states(self, backend: Backend, x: Any) -> Any:
        """The hidden state. [R, E] -> [R, W]"""
        return x if self.project_out is None else backend.linear(x, self.project_out)  # [R, E] -> [R, W]

    def __call__(self, backend: Backend, states: Any) -> Any:
        """The same. [R, W] -> [R, W]"""
        return states


Head = LMHead | ClassificationHead | NoHead
