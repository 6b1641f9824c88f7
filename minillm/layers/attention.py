"""Multi-head self-attention: project Q, K, V; partition into heads; store K, V; attend; merge; project out.

The steps follow the lecture's tables; some families norm and rotate queries and keys before storing. W^Q, W^K and W^V
are one fused weight, since one large product is faster than three; `project_qkv` splits its result.
"""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.pages import Pages
from ..backends.weights import Weight
from ..batch import Batch
from ..reference.attention import AttentionSpec
from ..reference.rotary import Rotation


def project_qkv(backend: Backend, x: Any, weight: Weight, H: int, K: int, factors: Any = None) -> tuple[Any, Any, Any]:
    """Q = x W^Q, K = x W^K, V = x W^V, each with its bias, and times a factor of each column if there are some.

    Args:
        backend: the backend
        x: [T, E]
        weight: W^Q, W^K, W^V stacked, [(H + 2 K) D, E]
        H: query heads
        K: key/value heads
        factors: of the columns, [(H + 2 K) D], or None

    Returns:
        q [T, H, D], k [T, K, D], v [T, K, D]: views of one array.
    """
    qkv = backend.linear(x, weight)  # [T, E] -> [T, (H + 2 K) D]
    if factors is not None:
        qkv = backend.multiply(qkv, factor=factors)
    heads = partition_heads(qkv, H + 2 * K)  # [T, (H + 2 K) D] -> [T, H + 2 K, D]
    return heads[:, :H], heads[:, H : H + K], heads[:, H + K :]


def partition_heads(x: Any, heads: int) -> Any:
    """Split each row into heads. [T, heads D] -> [T, heads, D]"""
    return x.reshape(x.shape[0], heads, -1)


def merge_heads(z: Any) -> Any:
    """Concatenate the heads of each row. [T, H, D] -> [T, H D]"""
    return z.reshape(z.shape[0], -1)


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """RMS norm of each query and key head before their product (Henry et al., arXiv 2010.04245)."""

    q: Weight
    """[D]"""
    k: Weight
    """[D]"""
    epsilon: float

    def __call__(self, backend: Backend, q: Any, k: Any) -> tuple[Any, Any]:
        """[T, H, D], [T, K, D] -> [T, H, D], [T, K, D]"""
        return backend.rms_norm(q, self.q, self.epsilon), backend.rms_norm(k, self.k, self.epsilon)


@dataclass(frozen=True, eq=False)
class ProjectionNorms:
    """RMS norm of a token's queries, all heads as one row, and of its keys (OLMoE, OLMo 2, arXiv 2501.00656).

    The mean square spans all heads: ranks that share a layer compute them all, and each goes on with its own.
    """

    q: Weight
    """[H D], of all ranks' heads"""
    k: Weight
    """[K D]"""
    epsilon: float
    heads: tuple[int, int]
    own: tuple[slice, slice]
    """H and K of all ranks, and the heads of q, and of k and v, that are this rank's"""

    def __call__(self, backend: Backend, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """[T, H, D], 2 x [T, K, D] -> this rank's heads of each"""
        q = backend.rms_norm(merge_heads(q), self.q, self.epsilon).reshape(q.shape)  # -> [T, H D] -> [T, H, D]
        k = backend.rms_norm(merge_heads(k), self.k, self.epsilon).reshape(k.shape)  # -> [T, K D] -> [T, K, D]
        return q[:, self.own[0]], k[:, self.own[1]], v[:, self.own[1]]


@dataclass(frozen=True, eq=False)
class Attention:
    """Multi-head self-attention of one layer."""

    layer: int
    num_heads: int
    num_kv_heads: int
    spec: AttentionSpec
    """Scale, mask, and what else changes a score"""
    qkv: Weight
    """[(H + 2 K) D, E], gated [(2 H + 2 K) D, E]"""
    out: Weight
    """[E, H D]"""
    rotation: Rotation | None = None
    """Rotary position embedding; None: positions enter in another way"""
    head_norms: HeadNorms | None = None
    projection_norms: ProjectionNorms | None = None
    norms_follow_rotation: bool = False
    """Queries and keys are rotated before `head_norms`, not after (Hunyuan)"""
    gated: bool = False
    """The heads' results are multiplied by sigmoids, whose logits are projected with the queries: rows of `qkv` after
    them (Qiu et al., arXiv 2505.06708)"""
    group: int = 0
    """Number of the layers with such keys and values (`ModelConfig.kv_groups`)"""
    factors: Weight | None = None
    """[(H + 2 K) D], of the columns of q, k and v (Falcon-H1); None: 1"""

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch, residual: Any | None) -> Any:
        """residual + attention(x) W^O. [T, E] -> [T, E]"""
        projected = (
            (self.num_heads, self.num_kv_heads) if self.projection_norms is None else self.projection_norms.heads
        )
        H, K = projected
        q, k, v = project_qkv(backend, x, self.qkv, 2 * H if self.gated else H, K, self.factors)  # -> [T, heads, D]
        q, gate = (q[:, :H], q[:, H:]) if self.gated else (q, None)  # [T, 2 H, D] -> 2 x [T, H, D]
        if self.projection_norms is not None:
            q, k, v = self.projection_norms(backend, q, k, v)
        if self.head_norms is not None and not self.norms_follow_rotation:
            q, k = self.head_norms(backend, q, k)
        if self.rotation is not None:
            q, k = backend.rotary(q, k, batch, self.rotation)
        if self.head_norms is not None and self.norms_follow_rotation:
            q, k = self.head_norms(backend, q, k)
        if self.group:
            cache, batch = cache.groups[self.group], batch.in_group(self.group)
        backend.store_kv(k, v, cache, self.layer, batch)
        z = backend.attend(q, cache, self.layer, batch, self.spec)
        z = merge_heads(z)  # [T, H, D] -> [T, H D]
        if gate is not None:
            z = backend.gate(z, merge_heads(gate))
        return backend.linear_reduced(z, self.out, residual)  # [T, H D] -> [T, E]
