"""Cross-attention: the decoder's queries over the encoder's result, and the transformer blocks that have it.

Vaswani et al., arXiv 1706.03762, sections 3.1 and 3.2.3. Keys and values depend on the source alone: they are computed
once, when the encoder has run (`CrossAttention.store`), and read from the source's pages in every step.
"""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.pages import Pages
from ..backends.weights import Weight
from ..batch import Batch
from ..reference.attention import AttentionSpec
from .attention import Attention, merge_heads, partition_heads
from .mlp import MLP, GatedMLP
from .norm import Norm


@dataclass(frozen=True, eq=False)
class CrossAttention:
    """Multi-head attention of one of the decoder's layers over the source of each sequence."""

    layer: int
    num_heads: int
    num_kv_heads: int
    spec: AttentionSpec
    """Scale; attention is over the source, and not causal"""
    q: Weight
    """[H D, E]"""
    kv: Weight
    """W^K, W^V stacked, [2 K D, E]"""
    out: Weight
    """[E, H D]"""

    def store(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> None:
        """Store the keys and values of the encoder's result in this layer's pages. x: [T, E], a batch of sources"""
        kv = partition_heads(backend.linear(x, self.kv), 2 * self.num_kv_heads)  # [T, E] -> [T, 2 K, D]
        backend.store_kv(kv[:, : self.num_kv_heads], kv[:, self.num_kv_heads :], cache, self.layer, batch)

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch, residual: Any | None) -> Any:
        """residual + attention(x over the source) W^O. [T, E] -> [T, E]"""
        q = partition_heads(backend.linear(x, self.q), self.num_heads)  # [T, E] -> [T, H, D]
        z = backend.attend(q, cache, self.layer, batch, self.spec)
        return backend.linear_reduced(merge_heads(z), self.out, residual)  # [T, H, D] -> [T, H D] -> [T, E]


@dataclass(frozen=True, eq=False)
class _CrossParts:
    """Components of a decoder's block, in the order in which they run."""

    attention_norm: Norm
    attention: Attention
    cross_norm: Norm
    cross: CrossAttention
    mlp_norm: Norm
    mlp: MLP | GatedMLP


class PreNormCross(_CrossParts):
    """Pre-norm block with cross-attention (T5, mBART, Pegasus)."""

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """x = x + attention(norm(x));  x = x + cross(norm(x));  x + mlp(norm(x)). [T, E] -> [T, E]"""
        x = self.attention(backend, self.attention_norm(backend, x), cache, batch, residual=x)
        x = self.cross(backend, self.cross_norm(backend, x), cache, batch, residual=x)
        return self.mlp(backend, self.mlp_norm(backend, x), residual=x)


class PostNormCross(_CrossParts):
    """Post-norm block with cross-attention, as in the original transformer (BART, MarianMT)."""

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """x = norm(x + attention(x));  x = norm(x + cross(x));  norm(x + mlp(x)). [T, E] -> [T, E]"""
        x = self.attention_norm(backend, self.attention(backend, x, cache, batch, residual=x))
        x = self.cross_norm(backend, self.cross(backend, x, cache, batch, residual=x))
        return self.mlp_norm(backend, self.mlp(backend, x, residual=x))


CrossBlock = PreNormCross | PostNormCross
