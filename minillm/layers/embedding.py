"""The two ends of a language model: from token ids to hidden states, and from these to logits.

Some families embed positions, learned or sinusoidal, and token types beside the tokens. The head's matrix is often the
table of the embedding itself (Press and Wolf, "Using the Output Embedding", arXiv 1608.05859).
"""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight
from ..batch import Batch
from .norm import Norm


@dataclass(frozen=True, eq=False)
class Embedding:
    """Token embedding, projected to the model's width if narrower, plus position embedding if there is one."""

    tokens: Weight
    """[V, E], or [V, W] with a narrower W"""
    positions: Weight | None = None
    """[positions, E]"""
    project_in: Weight | None = None
    """[E, W]"""
    types: Weight | None = None
    """[types, E]: which of two texts a token is in (BERT)"""
    norm: Norm | None = None
    project_normed: Weight | None = None
    """[E, W], of tables with a narrower W, after the norm (ELECTRA)"""
    scale: float = 1.0
    """Factor of the token's vector (Gemma, Granite, mBART)"""
    given_scale: float = 1.0
    """Factor of a vector given in the place of a token's (`runner/given_embeddings.py`), as transformers has it"""

    def __call__(self, backend: Backend, batch: Batch) -> Any:
        """x = scale * tokens[ids] (W_in) + positions[i] + types[t], then norm and projection if any. [T] -> [T, E]"""
        x = self._vectors(backend, batch)
        x = x if self.norm is None else self.norm(backend, x)
        return x if self.project_normed is None else backend.linear(x, self.project_normed)  # [T, W] -> [T, E]

    def _vectors(self, backend: Backend, batch: Batch) -> Any:
        """[T] -> [T, E]"""
        if self.project_in is not None and self.positions is not None:
            p = backend.embed(batch.positions, self.positions)  # [T] -> [T, E]
            x = backend.embed_reduced(batch.token_ids, self.tokens)  # [T] -> [T, W]
            return backend.linear(x, self.project_in, residual=p)  # [T, W] -> [T, E]
        added: dict[str, Any] = {}
        if self.positions is not None:
            added = {"positions": batch.positions, "position_table": self.positions}
        if self.types is not None:
            assert batch.types is not None, "sequences of this model have token types"
            added |= {"types": batch.types, "type_table": self.types}
        return backend.embed_reduced(batch.token_ids, self.tokens, self.scale, **added)  # 3 x [T] -> [T, E]


@dataclass(frozen=True, eq=False)
class LMHead:
    """logits = x W_lm, scaled or capped in some families; x is projected to the embedding's width if that differs."""

    weight: Weight
    """[V, W]; often the token embedding itself (tied)"""
    project_out: Weight | None = None
    """[W, E]; None if W = E"""
    scale: float = 1.0
    """Factor of logits (Granite)"""
    cap: float | None = None
    """Soft cap c of logits, c tanh(logits / c) (Gemma 2); None: no cap"""

    def states(self, backend: Backend, x: Any) -> Any:
        """Input of the product with `weight`. [R, E] -> [R, W]"""
        return x if self.project_out is None else backend.linear(x, self.project_out)  # [R, E] -> [R, W]

    def __call__(self, backend: Backend, states: Any) -> Any:
        """Logits of each row. [R, W] -> [R, V]"""
        logits = backend.linear(states, self.weight)  # [R, W] -> [R, V]
        if self.scale == 1 and self.cap is None:
            return logits
        return backend.scale_logits(logits, self.scale, self.cap)
