"""A convolution over a token and its neighbours on both sides, beside the first layer of an encoder (DeBERTa v2)."""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.pages import Pages
from ..backends.weights import Weight
from ..batch import Batch
from .block import PostNorm
from .norm import Norm


@dataclass(frozen=True, eq=False)
class NeighbourConvolution:
    """A convolution of all channels, as a product with rows side by side."""

    weight: Weight
    """[E, k E], of the first neighbour's numbers first, and a bias [E]"""
    width: int
    """k, odd"""
    activation: str

    def __call__(self, backend: Backend, x: Any, batch: Batch, residual: Any) -> Any:
        """residual + activation(convolution(x)). [T, E] -> [T, E]"""
        rows = backend.unfold(x, self.width, batch)  # [T, E] -> [T, k E]
        return backend.linear(rows, self.weight, activation=self.activation, residual=residual)  # [T, k E] -> [T, E]


@dataclass(frozen=True, eq=False)
class ConvolvedPostNorm(PostNorm):
    """Post-norm block to whose result a convolution of x is added (https://github.com/microsoft/DeBERTa, "nGiE")."""

    convolution: NeighbourConvolution
    convolution_norm: Norm

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """norm(post_norm(x) + convolution(x)). [T, E] -> [T, E]"""
        y = super().__call__(backend, x, cache, batch)
        return self.convolution_norm(backend, self.convolution(backend, x, batch, residual=y))
