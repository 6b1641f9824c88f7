"""A mixture of experts in place of a layer's MLP: MLPs, mostly gated; a router chooses some for each token."""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight
from ..reference.experts import SOFTMAX, RouterSpec, Routing
from .mlp import MLP, GatedMLP
from .norm import RMSNorm


@dataclass(frozen=True, eq=False)
class ExpertMLP:
    """X MLPs, k of them for each token (Jiang et al., arXiv 2401.04088, section 2.1)."""

    router: Weight
    """[X, E]"""
    gate_up: Weight
    """W_gate, W_up of each expert stacked, [X, 2 F, E]; or W_up alone, [X, F, E], without a gate"""
    down: Weight
    """[X, E, F]"""
    top_k: int
    """k: experts of each token"""
    normalised: bool
    """The weights of a token's experts sum to one"""
    activation: str
    spec: RouterSpec = SOFTMAX
    """How logits become scores, and scores a choice"""
    correction: Weight | None = None
    """Added to the scores for the choice alone, [X]"""
    shared: GatedMLP | MLP | None = None
    """An MLP that computes every token (DeepSeekMoE: Dai et al., arXiv 2401.06066, section 3.2)"""
    shared_gate: Weight | None = None
    """The sigmoid of its product is the factor of the shared MLP's result, [1, E] (Qwen2-MoE)"""

    factors: Weight | None = None
    """Factor of each expert's weight once it is chosen, [X] (Gemma 4)"""
    gated: bool = True
    """False: experts have the square of ReLU between two projections (Nemotron 3)"""

    def __call__(self, backend: Backend, x: Any, residual: Any | None, *, routed: Any = None) -> Any:
        """residual + the weighted sum of each token's k experts, + the shared MLP's result. [T, E] -> [T, E]

        The router reads `routed` [T, E] if it is given, else x.
        """
        logits = backend.linear(x if routed is None else routed, self.router)  # [T, E] -> [T, X]
        routing = self.route(backend, logits)  # [T, X] -> [T, k]
        if self.shared is not None:
            residual = self._add_shared(backend, self.shared, x, residual)
        rows = backend.take_rows(x, routing.tokens)  # [T, E] -> [T k, E], sorted by expert
        hidden = backend.linear_experts(rows, self.gate_up, routing)  # [T k, E] -> [T k, 2 F]
        hidden = self._activate(backend, hidden)  # [T k, 2 F] -> [T k, F]
        y = backend.linear_experts(hidden, self.down, routing)  # [T k, F] -> [T k, E]
        return backend.combine_reduced(y, routing, residual)  # [T k, E] -> [T, E]

    def _activate(self, backend: Backend, hidden: Any) -> Any:
        """The gate; without one the square of ReLU, its gate of a row with itself. [T k, 2 F or F] -> [T k, F]"""
        return backend.glu(hidden, self.activation) if self.gated else backend.glu(hidden, "relu", alone=True)

    def route(self, backend: Backend, logits: Any) -> Routing:
        """Each token's experts. [T, X] -> [T, k]"""
        if self.factors is not None:
            return backend.route(logits, self.top_k, normalised=self.normalised, factors=self.factors)
        if self.correction is None and self.spec == SOFTMAX:
            return backend.route(logits, self.top_k, normalised=self.normalised)
        return backend.route(logits, self.top_k, normalised=self.normalised, bias=self.correction, spec=self.spec)

    def _add_shared(self, backend: Backend, shared: GatedMLP | MLP, x: Any, residual: Any) -> Any:
        """residual + sigmoid(x W_g) * shared(x). [T, E] -> [T, E]

        The factor is that of the hidden layer, which has one number of a token in place of the result's sum over ranks.
        """
        if self.shared_gate is None or not isinstance(shared, GatedMLP):
            return shared(backend, x, residual)
        hidden = backend.glu(backend.linear(x, shared.gate_up), shared.activation)  # [T, E] -> [T, 2 F] -> [T, F]
        hidden = backend.gate(hidden, backend.linear(x, self.shared_gate))  # [T, F], [T, 1] -> [T, F]
        return backend.linear_reduced(hidden, shared.down, residual)  # [T, F] -> [T, E]


@dataclass(frozen=True, eq=False)
class SideExperts:
    """Experts beside a layer's MLP, with norms of their own and of the MLP's result (Gemma 4)."""

    experts: ExpertMLP
    router_norm: RMSNorm
    norm: RMSNorm
    out_norm: RMSNorm
    mlp_out_norm: RMSNorm

    def __call__(self, backend: Backend, x: Any, y: Any) -> Any:
        """norm(y) + norm(experts(norm(x))), y being the MLP's result of x. 2 x [T, E] -> [T, E]"""
        y = self.mlp_out_norm(backend, y)
        chosen = self.experts(backend, self.norm(backend, x), None, routed=self.router_norm(backend, x))
        return self.out_norm(backend, chosen, residual=y)
