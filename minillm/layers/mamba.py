"""Mamba-2 in place of attention, or beside it: project, convolve, scan, gate, norm, project out.

The layer of Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060), figure 6, with the norm after the gate, in some
models before it: z, u and dt are parts of x W_in; x, B and C of silu(conv(u)). It keeps no keys and values of a
sequence, but the last k - 1 rows of u and a state of each head.
"""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.pages import Pages
from ..backends.weights import Weight
from ..batch import Batch
from .attention import Attention
from .experts import ExpertMLP
from .mlp import GatedMLP
from .norm import RMSNorm


@dataclass(frozen=True, eq=False)
class Mamba2:
    """A state space with H heads of P values, in G groups."""

    layer: int
    num_heads: int
    """H"""
    head_dim: int
    """P"""
    groups: int
    """G: heads of a group share B and C, and are normed together"""
    state_size: int
    """N"""
    limits: tuple[float, float]
    """The least and the largest step"""
    activation: str
    """After the convolution"""
    projection: Weight
    """Rows of z, x, B, C and dt, [2 H P + 2 G N + H, E]"""
    taps: Weight
    """[k (H P + 2 G N)], of the oldest input first, and a bias or none"""
    rates: Weight
    """Rates of decay and factors to skip, [2 H], and as bias the steps'"""
    norm: RMSNorm | None
    """[H P]"""
    out: Weight
    """[E, H P]"""
    norm_first: bool = False
    """The norm comes before the gate"""
    factors: Weight | None = None
    """[2 H P + 2 G N + H], of the columns of the first projection (Falcon-H1); None: 1"""

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch, residual: Any | None) -> Any:
        """residual + norm(silu(z) * scan(silu(conv(u)), dt)) W_out. [T, E] -> [T, E]"""
        inner = self.num_heads * self.head_dim
        parts = backend.linear(x, self.projection)  # [T, E] -> [T, 2 H P + 2 G N + H]
        if self.factors is not None:
            parts = backend.multiply(parts, factor=self.factors)
        z, u, steps = parts[:, :inner], parts[:, inner : -self.num_heads], parts[:, -self.num_heads :]
        u = backend.convolve(u, self.taps, cache, self.layer, batch, activation=self.activation)
        variant: dict[str, Any] = {"groups": (self.groups, self.state_size), "limits": self.limits}
        y = backend.selective_scan(u, steps, self.rates, cache, self.layer, batch, **variant)  # -> [T, H P]
        y = self._normed(backend, y) if self.norm_first else y
        y = backend.gate(y, z, silu=True)
        y = y if self.norm_first else self._normed(backend, y)
        return backend.linear_reduced(y, self.out, residual)  # [T, H P] -> [T, E]

    def _normed(self, backend: Backend, y: Any) -> Any:
        """The norm of each group, if there is one. [T, H P] -> [T, H P]"""
        if self.norm is None:
            return y
        by_group = y.reshape(len(y), self.groups, -1)  # [T, H P] -> [T, G, H P / G]
        return self.norm(backend, by_group).reshape(y.shape)  # [T, G, H P / G] -> [T, H P]


@dataclass(frozen=True, eq=False)
class MambaBlock:
    """Pre-norm block with Mamba-2 in place of attention (Granite 4, Bamba)."""

    mamba_norm: RMSNorm
    mamba: Mamba2
    mlp_norm: RMSNorm
    mlp: GatedMLP | ExpertMLP

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """x = x + mamba(norm(x));  x + mlp(norm(x)). [T, E] -> [T, E]"""
        x = self.mamba(backend, self.mamba_norm(backend, x), cache, batch, residual=x)
        return self.mlp(backend, self.mlp_norm(backend, x), residual=x)


@dataclass(frozen=True, eq=False)
class ParallelMamba:
    """Pre-norm block with Mamba-2 beside attention, both of one norm (Falcon-H1, arXiv 2507.22448, section 2)."""

    attention_norm: RMSNorm
    attention: Attention
    mamba: Mamba2
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """x = x + attention(norm(x)) + mamba(norm(x));  x + mlp(norm(x)). [T, E] -> [T, E]"""
        normed = self.attention_norm(backend, x)
        x = self.attention(backend, normed, cache, batch, residual=x)
        x = self.mamba(backend, normed, cache, batch, residual=x)
        return self.mlp(backend, self.mlp_norm(backend, x), residual=x)
