"""The decoder-only transformer that all families build: embedding, blocks, final norm, LM head."""

from dataclasses import dataclass
from typing import Any

from ..backends.base import Backend
from ..backends.pages import Pages
from ..batch import Batch
from ..config import ModelConfig
from ..layers.block import Block
from ..layers.embedding import Embedding
from ..layers.head import LMHead
from ..layers.norm import Norm


@dataclass(frozen=True, eq=False)
class Decoder:
    """A complete model (see `base.Model`)."""

    config: ModelConfig
    embedding: Embedding
    layers: tuple[Block, ...]
    final_norm: Norm | None
    head: LMHead

    def forward(self, backend: Backend, batch: Batch, cache: Pages) -> Any:
        """The last hidden state of every new token, after the final norm. [T] -> [T, E]"""
        x = self.embedding(backend, batch)  # [T] -> [T, E]
        for i, layer in enumerate(self.layers):
            backend.enter_layer(i)
            x = layer(backend, x, cache, batch)
        backend.enter_layer(len(self.layers))
        return x if self.final_norm is None else self.final_norm(backend, x)

    def states(self, backend: Backend, x: Any) -> Any:
        """The input of the LM head's product; opt-350m projects it to the embedding's width. [R, E] -> [R, W]"""
        return self.head.states(backend, x)

    def logits(self, backend: Backend, hidden: Any) -> Any:
        """The language model head. [R, W] -> [R, V]"""
        return self.head(backend, hidden)
