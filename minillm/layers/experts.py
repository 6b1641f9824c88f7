"""A mixture of experts in place of a layer's MLP: gated MLPs; a router chooses some for each token."""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight


@dataclass(frozen=True, eq=False)
class ExpertMLP:
    """X gated MLPs, k of them for each token (Jiang et al., arXiv 2401.04088, section 2.1)."""

    router: Weight
    """[X, E]"""
    gate_up: Weight
    """W_gate, W_up of each expert stacked, [X, 2 F, E]"""
    down: Weight
    """[X, E, F]"""
    top_k: int
    """k: experts of each token"""
    normalised: bool
    """The weights of a token's experts sum to one"""
    activation: str

    def __call__(self, backend: Backend, x: Any, residual: Any) -> Any:
        """residual + the weighted sum of each token's k experts. [T, E] -> [T, E]"""
        logits = backend.linear(x, self.router)  # [T, E] -> [T, X]
        routing = backend.route(logits, self.top_k, normalised=self.normalised)  # [T, X] -> [T, k]
        rows = backend.take_rows(x, routing.tokens)  # [T, E] -> [T k, E], sorted by expert
        hidden = backend.linear_experts(rows, self.gate_up, routing)  # [T k, E] -> [T k, 2 F]
        hidden = backend.glu(hidden, self.activation)  # [T k, 2 F] -> [T k, F]
        y = backend.linear_experts(hidden, self.down, routing)  # [T k, F] -> [T k, E]
        return backend.combine_reduced(y, routing, residual)  # [T k, E] -> [T, E]
