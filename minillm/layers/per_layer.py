"""Per-layer embeddings (Gemma 3n and 4): each layer adds to the stream what a vector of its own of the token says.

    p = (norm(x W_p / sqrt E) + sqrt P * table[ids]) / sqrt 2      once a pass, of all layers: [T, L P]
    x = x + norm((activation(x W_gate) * p[layer]) W_out)          in each layer

The norms undo both factors but for what is added to the mean square: norm(c y) with epsilon is norm(y) with
epsilon / c^2. So nothing is multiplied here, and epsilons are multiples.
"""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.pages import Pages
from ..backends.weights import Weight
from ..batch import Batch
from .block import Sandwich
from .experts import SideExperts
from .norm import RMSNorm


@dataclass(frozen=True, eq=False)
class PerLayerEmbedding:
    """The vectors of all layers, P numbers for each: a token's own, and a projection of its embedding."""

    table: Weight
    """[V, L P]"""
    scale: float
    """Factor of the token's own vectors"""
    projection: Weight
    """[L P, E]"""
    norm: RMSNorm
    """[P], of each layer's part of the projection"""
    layers: int

    def __call__(self, backend: Backend, x: Any, batch: Batch) -> Any:
        """sqrt 2 times each layer's vector of each token, valid until the pass ends. [T, E], [T] -> [T, L, P]"""
        with backend.memory.arena.for_pass():
            own = backend.embed_reduced(batch.token_ids, self.table, self.scale)  # [T] -> [T, L P]
            projected = backend.linear(x, self.projection)  # [T, E] -> [T, L P]
            T, P = len(x), projected.shape[1] // self.layers
            projected, own = (y.reshape(T * self.layers, P) for y in (projected, own))  # [T, L P] -> [T L, P]
            return self.norm(backend, projected, residual=own).reshape(T, self.layers, P)  # -> [T, L, P]


@dataclass(frozen=True, eq=False)
class PerLayerInput:
    """The product of a layer's gate and its vectors, projected and normed; every rank computes all of it."""

    gate: Weight
    """[P, E]"""
    out: Weight
    """[E, P]"""
    norm: RMSNorm
    activation: str

    def __call__(self, backend: Backend, x: Any, vectors: Any) -> Any:
        """x + norm((activation(x W_gate) * vectors) W_out). [T, E], [T, P] -> [T, E]"""
        hidden = backend.linear(x, self.gate, activation=self.activation)  # [T, E] -> [T, P]
        hidden = backend.multiply(hidden, vectors)
        return self.norm(backend, backend.linear(hidden, self.out), residual=x)  # [T, P] -> [T, E]


@dataclass(frozen=True, eq=False)
class ScaledSandwich(Sandwich):
    """Sandwich block of Gemma 4, whose result has a factor; it may have experts and per-layer inputs."""

    factor: Weight
    """[1]"""
    experts: SideExperts | None = None
    """Experts beside the MLP"""
    per_layer: PerLayerInput | None = None

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch, vectors: Any = None) -> Any:
        """x = x + norm(attention(norm(x)));  x = x + norm(mlp(norm(x)));  factor * per_layer(x). [T, E] -> [T, E]

        `vectors` [T, P] are the layer's of each token, if it has per-layer inputs.
        """
        attended = self.attention(backend, self.attention_norm(backend, x), cache, batch, residual=None)
        x = self.attention_out_norm(backend, attended, residual=x)
        y = self.mlp(backend, self.mlp_norm(backend, x), residual=None)
        if self.experts is not None:
            y = self.experts(backend, x, y)
        x = self.mlp_out_norm(backend, y, residual=x)
        if self.per_layer is not None:
            x = self.per_layer(backend, x, vectors)
        return backend.multiply(x, factor=self.factor)
