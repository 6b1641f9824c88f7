"""Attention of layers that differ in their keys and values (Gemma 4): shared by layers, or values made of keys.

A layer may read the keys and values of an earlier one and have queries alone; or its values are its keys before their
norm and rotation. Heads may have other widths and numbers in other layers: `ModelConfig.kv_shapes` and `kv_sources`.
"""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.pages import Pages
from ..backends.weights import Weight
from ..batch import Batch
from .attention import Attention, merge_heads, partition_heads, project_qkv


@dataclass(frozen=True, eq=False)
class SharedAttention(Attention):
    """Self-attention of one layer with norms of its heads; `layer` is the one whose keys and values it reads.

    `qkv` has the rows of W^Q, then of W^K unless the layer `only_reads`, then of W^V unless its values are its keys.
    """

    only_reads: bool = False
    """The keys and values are another layer's"""
    keys_are_values: bool = False
    value_norm: Weight | None = None
    """RMS norm of each value head; None: values are not normed"""

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch, residual: Any | None) -> Any:
        """residual + attention(x) W^O. [T, E] -> [T, E]"""
        q, k, v = self._project(backend, x)  # [T, E] -> [T, H, D], 2 x [T, K, D]
        if self.rotation is not None:
            q, k = backend.rotary(q, k, batch, self.rotation)
        if self.group:
            cache, batch = cache.groups[self.group], batch.in_group(self.group)
        if not self.only_reads:
            backend.store_kv(k, v, cache, self.layer, batch)
        z = merge_heads(backend.attend(q, cache, self.layer, batch, self.spec))  # [T, H, D] -> [T, H D]
        return backend.linear_reduced(z, self.out, residual)  # [T, H D] -> [T, E]

    def _project(self, backend: Backend, x: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values, normed; of a layer that only reads, a query head stands for what is not needed."""
        H, K, norms = self.num_heads, self.num_kv_heads, self.head_norms
        assert norms is not None
        if self.only_reads:
            q = partition_heads(backend.linear(x, self.qkv), H)  # [T, E] -> [T, H D] -> [T, H, D]
            q = backend.rms_norm(q, norms.q, norms.epsilon)
            return q, q[:, :1], q[:, :1]
        if self.keys_are_values:
            heads = partition_heads(backend.linear(x, self.qkv), H + K)  # [T, E] -> [T, H + K, D]
            q, k, v = heads[:, :H], heads[:, H:], heads[:, H:]
        else:
            q, k, v = project_qkv(backend, x, self.qkv, H, K)  # [T, E] -> [T, H, D], 2 x [T, K, D]
        if self.value_norm is not None:
            v = backend.rms_norm(v, self.value_norm, norms.epsilon)
        q, k = norms(backend, q, k)
        return q, k, v
