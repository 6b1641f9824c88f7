"""Transformer blocks: attention and MLP with residual connections. Families differ in the position of the norms."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ..backends.operations import Backend
from ..backends.pages import Pages
from ..batch import Batch
from .attention import Attention
from .mlp import MLP, GatedMLP
from .norm import Norm, RMSNorm

if TYPE_CHECKING:
    from .convolution import ConvolutionBlock
    from .delta_net import DeltaNetBlock
    from .experts import ExpertMLP
    from .mamba import Mamba2, MambaBlock, ParallelMamba


@dataclass(frozen=True, eq=False)
class _Parts:
    """Components of every block."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: "MLP | GatedMLP | ExpertMLP"


@dataclass(frozen=True, eq=False)
class PreNorm:
    """Pre-norm block: attention and MLP read norm(x) (Xiong et al., arXiv 2002.04745, figure 1b)."""

    attention_norm: Norm | None
    """None where x has been normed before (the first layer of ModernBERT)"""
    attention: Attention
    mlp_norm: Norm
    mlp: "MLP | GatedMLP | ExpertMLP"

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """x = x + attention(norm(x));  x + mlp(norm(x)). [T, E] -> [T, E]"""
        normed = x if self.attention_norm is None else self.attention_norm(backend, x)
        x = self.attention(backend, normed, cache, batch, residual=x)
        return self.mlp(backend, self.mlp_norm(backend, x), residual=x)


class PostNorm(_Parts):
    """Post-norm block: a norm after each residual sum (Vaswani et al., arXiv 1706.03762, section 3.1)."""

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """x = norm(x + attention(x));  norm(x + mlp(x)). [T, E] -> [T, E]"""
        x = self.attention_norm(backend, self.attention(backend, x, cache, batch, residual=x))
        return self.mlp_norm(backend, self.mlp(backend, x, residual=x))


class Parallel(_Parts):
    """Parallel block: both read the same x, each with its own norm (Black et al., arXiv 2204.06745, section 2.1.2)."""

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """x + attention(norm(x)) + mlp(norm(x)). [T, E] -> [T, E]"""
        attended = self.attention(backend, self.attention_norm(backend, x), cache, batch, residual=x)
        return self.mlp(backend, self.mlp_norm(backend, x), residual=attended)


class ParallelOneNorm(Parallel):
    """Parallel block with one norm, `attention_norm`, which is `mlp_norm` too (Wang and Komatsuzaki's GPT-J, 2021)."""

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """x + attention(norm(x)) + mlp(norm(x)). [T, E] -> [T, E]"""
        normed = self.attention_norm(backend, x)
        attended = self.attention(backend, normed, cache, batch, residual=x)
        return self.mlp(backend, normed, residual=attended)


@dataclass(frozen=True, eq=False)
class Sandwich:
    """Pre-norm block whose sublayers' results are normed too, before the sum (Ding et al., arXiv 2105.13290, 3.4)."""

    attention_norm: Norm
    attention: Attention
    attention_out_norm: RMSNorm
    mlp_norm: Norm
    mlp: MLP | GatedMLP
    mlp_out_norm: RMSNorm

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """x = x + norm(attention(norm(x)));  x + norm(mlp(norm(x))). [T, E] -> [T, E]"""
        attended = self.attention(backend, self.attention_norm(backend, x), cache, batch, residual=None)
        x = self.attention_out_norm(backend, attended, residual=x)
        return self.mlp_out_norm(backend, self.mlp(backend, self.mlp_norm(backend, x), residual=None), residual=x)


@dataclass(frozen=True, eq=False)
class OutputNorm:
    """Block that norms its sublayers' results, not what they read (Liu et al., arXiv 2111.09883, section 3.2)."""

    attention: Attention
    attention_norm: RMSNorm
    mlp: MLP | GatedMLP
    mlp_norm: RMSNorm

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """x = x + norm(attention(x));  x + norm(mlp(x)). [T, E] -> [T, E]"""
        x = self.attention_norm(backend, self.attention(backend, x, cache, batch, residual=None), residual=x)
        return self.mlp_norm(backend, self.mlp(backend, x, residual=None), residual=x)


@dataclass(frozen=True, eq=False)
class Sublayer:
    """Pre-norm block of one part: attention, Mamba-2, an MLP or experts (Nemotron-H, arXiv 2504.03624, section 2.1)."""

    norm: RMSNorm
    part: "Attention | Mamba2 | MLP | ExpertMLP"

    def __call__(self, backend: Backend, x: Any, cache: Pages, batch: Batch) -> Any:
        """x + part(norm(x)). [T, E] -> [T, E]"""
        from .experts import ExpertMLP

        normed = self.norm(backend, x)
        if isinstance(self.part, MLP | ExpertMLP):
            return self.part(backend, normed, residual=x)
        return self.part(backend, normed, cache, batch, residual=x)


Recurrent: TypeAlias = "ConvolutionBlock | DeltaNetBlock | MambaBlock | ParallelMamba"
Block: TypeAlias = "PreNorm | PostNorm | Parallel | Sandwich | OutputNorm | Sublayer | Recurrent"
