"""Gated DeltaNet, a linear attention: project, convolve, gated delta rule, norm, gate, project out.

The layer of Yang et al. (arXiv 2412.06464, section 3.4) as Qwen3-Next has it:

    queries, keys, values | z | b, a = x W_in;    queries, keys, values = activation(conv(...))
    o = delta_rule(queries, keys, values, b, a)       each head; value heads in groups that share a key head
    (norm(o) * silu(z)) W_out                         the norm of each head

It keeps no keys and values of a sequence, but the last k - 1 inputs of the convolution and a matrix of each value head.
"""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.pages import Pages
from ..backends.weights import Weight
from ..batch import Batch
from .attention import merge_heads, partition_heads
from .experts import ExpertMLP
from .mlp import GatedMLP
from .norm import RMSNorm


@dataclass(frozen=True, eq=False)
class GatedDeltaNet:
    """Linear attention by the gated delta rule, K key heads of dk numbers and V value heads of dv."""

    layer: int
    keys: tuple[int, int]
    """K and dk"""
    value_heads: int
    """V"""
    projection: Weight
    """Queries, keys, values, z, b and a stacked, [2 K dk + 2 V dv + 2 V, E]"""
    taps: Weight
    """[k (2 K dk + V dv)], of the oldest input first"""
    decay: Weight
    """The logarithm of each value head's rate of decay, and a bias, [V] each"""
    norm: RMSNorm
    """Each value head's norm, [dv]"""
    out: Weight
    """[E, V dv]"""
    activation: str

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch, residual: Any | None) -> Any:
        """residual + delta_net(x) W_out. [T, E] -> [T, E]"""
        values = self.out.shape[1]
        mixed = 2 * self.keys[0] * self.keys[1] + values
        p = backend.linear(x, self.projection)  # [T, E] -> [T, 2 K dk + 2 V dv + 2 V]
        z, gates = p[:, mixed : mixed + values], p[:, mixed + values :]
        qkv = backend.convolve(p[:, :mixed], self.taps, cache, self.layer, batch, activation=self.activation)
        o = backend.delta_rule(qkv, gates, self.decay, cache, self.layer, batch, keys=self.keys)  # -> [T, V dv]
        o = self.norm(backend, partition_heads(o, self.value_heads))  # [T, V dv] -> [T, V, dv]
        o = backend.gate(merge_heads(o), z, silu=True)  # [T, V, dv] -> [T, V dv]
        return backend.linear_reduced(o, self.out, residual)  # [T, V dv] -> [T, E]


@dataclass(frozen=True, eq=False)
class DeltaNetBlock:
    """Pre-norm block with Gated DeltaNet in place of attention (Qwen3-Next)."""

    delta_net_norm: RMSNorm
    delta_net: GatedDeltaNet
    mlp_norm: RMSNorm
    mlp: GatedMLP | ExpertMLP

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """x = x + delta_net(norm(x));  x + mlp(norm(x)). [T, E] -> [T, E]"""
        x = self.delta_net(backend, self.delta_net_norm(backend, x), cache, batch, residual=x)
        return self.mlp(backend, self.mlp_norm(backend, x), residual=x)
