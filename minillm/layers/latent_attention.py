"""Latent attention (DeepSeek-AI, arXiv 2405.04434, section 2.1): keys and values of all heads from one vector.

    c = norm(x W^DKV), k_r = rotate(x W^KR)           one latent and one rotated key of a token: what the cache keeps
    k_h = [k_r; c W^UK_h], v_h = c W^UV_h              keys and values of head h
    z_h = softmax(q_h K_h^T scale) V_h

The expanded keys and values are never computed: W^UK is absorbed into the queries, [q_r; q_h W^UK_h^T], and W^UV into
the results, of which z_h is the product with it. What is left is attention of H query heads to one key head [k_r; c],
whose values are its last numbers, c. So a text has the same bits in whatever pieces it is computed.

Expanded heads take fewer products of a prompt: of DeepSeek-V2-Lite's 2.4 TFLOP for 512 tokens 94 G in place of 182. Its
attention took 152 ms a layer absorbed and 91 expanded, on one thread with AVX2; a token after 511 took 3.5 ms and 48.
"""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.pages import Pages
from ..backends.weights import Weight
from ..batch import Batch
from .attention import Attention, merge_heads, partition_heads
from .norm import RMSNorm


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentAttention(Attention):
    """Latent attention of one layer, with C the width of a latent, r of the rotated numbers, n of the others of a head.

    In the model the rotated numbers come first in each query, [r | n], and in what the cache keeps, [r | C].
    """

    kv: Weight
    """W^KR and W^DKV, [r + C, E]; `qkv` is W^Q alone, [H (r + n), E], or of low rank"""
    kv_norm: RMSNorm
    """[C]"""
    keys: Weight
    """W^UK of each head, transposed, [H C, n]"""
    values: Weight
    """W^UV of each head, [H V, C]"""
    q_down: Weight | None = None
    """Queries have low rank: W^DQ, [Q, E], and `qkv` is W^UQ, [H (r + n), Q]; None: they have not"""
    q_norm: RMSNorm | None = None
    """[Q]"""

    @property
    def latent(self) -> int:
        """C"""
        return self.values.shape[1]

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of queries r + n, of rotated keys r, and of latents C."""
        r = self.kv.shape[0] - self.latent
        return r + self.keys.shape[1], r, self.latent

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch, residual: Any | None) -> Any:
        """residual + attention(x) W^O. [T, E] -> [T, E]"""
        assert self.rotation is not None
        kv = backend.linear(x, self.kv)  # [T, E] -> [T, r + C]
        r = kv.shape[1] - self.latent
        c = self.kv_norm(backend, kv[:, r:])  # [T, C]
        q = self._queries(backend, x)  # [T, E] -> [T, H, r + n]
        q, k = backend.rotary(q, kv[:, None, :r], batch, self.rotation)  # [T, H, r + n], [T, 1, r]
        backend.store_kv(k, c[:, None], cache, self.layer, batch)
        q = backend.linear_heads(q, self.keys)  # [T, H, r + n] -> [T, H, r + C]
        z = backend.attend(q, cache, self.layer, batch, self.spec)  # [T, H, r + C] -> [T, H, C]
        z = merge_heads(backend.linear_heads(z, self.values))  # [T, H, C] -> [T, H, V] -> [T, H V]
        return backend.linear_reduced(z, self.out, residual)  # [T, H V] -> [T, E]

    def _queries(self, backend: Backend, x: Any) -> Any:
        if self.q_down is not None and self.q_norm is not None:
            x = self.q_norm(backend, backend.linear(x, self.q_down))  # [T, E] -> [T, Q]
        return partition_heads(backend.linear(x, self.qkv), self.num_heads)  # -> [T, H (r + n)] -> [T, H, r + n]
