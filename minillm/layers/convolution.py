"""A short causal convolution in place of attention: project, gate, convolve, gate, project out.

The layer of LFM2 ("LFM2 Technical Report", arXiv 2511.23404, section 2): (B, C, x) = x W_in, C * conv(B * x) W_out. It
keeps no keys and values of a sequence, but the last k - 1 rows of B * x.
"""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.pages import Pages
from ..backends.weights import Weight
from ..batch import Batch
from .experts import ExpertMLP
from .mlp import GatedMLP
from .norm import RMSNorm


@dataclass(frozen=True, eq=False)
class ShortConvolution:
    """A gated convolution of each channel over the last k tokens."""

    layer: int
    projection: Weight
    """W_B, W_C and W_x stacked, [3 E, E]"""
    taps: Weight
    """[k E], of the oldest input first, and a bias [E] or none"""
    out: Weight
    """[E, E]"""

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch, residual: Any | None) -> Any:
        """residual + (C * conv(B * x)) W_out. [T, E] -> [T, E]"""
        gates = backend.linear(x, self.projection)  # [T, E] -> [T, 3 E]
        y = backend.convolve(gates, self.taps, cache, self.layer, batch, gated=True)  # [T, 3 E] -> [T, E]
        return backend.linear_reduced(y, self.out, residual)  # [T, E] -> [T, E]


@dataclass(frozen=True, eq=False)
class ConvolutionBlock:
    """Pre-norm block with a short convolution in place of attention (LFM2)."""

    convolution_norm: RMSNorm
    convolution: ShortConvolution
    mlp_norm: RMSNorm
    mlp: GatedMLP | ExpertMLP

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """x = x + convolution(norm(x));  x + mlp(norm(x)). [T, E] -> [T, E]"""
        x = self.convolution(backend, self.convolution_norm(backend, x), cache, batch, residual=x)
        return self.mlp(backend, self.mlp_norm(backend, x), residual=x)
