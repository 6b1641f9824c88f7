"""The decoder-only transformer that all families build: embedding, blocks, final norm, LM head."""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.pages import Pages
from ..batch import Batch
from ..config import ModelConfig
from ..layers.block import Block
from ..layers.embedding import Embedding
from ..layers.encoder_head import Head
from ..layers.norm import Norm


@dataclass(frozen=True, eq=False)
class Decoder:
    """A complete model (see `base.Model`)."""

    config: ModelConfig
    embedding: Embedding
    layers: tuple[Block, ...]
    final_norm: Norm | None
    head: Head

    def forward(
        self, backend: Backend, batch: Batch, cache: Pages, *, layers: range | None = None, x: Any = None
    ) -> Any:
        """The last hidden state of every new token, after the final norm. [T] -> [T, E]

        Or a stage of it: the layers of a range, from the hidden state x [T, E] before the first of them (the embedding
        where there is none), to the hidden state after the last of them, with the final norm if it is the model's last.
        """
        layers = range(len(self.layers)) if layers is None else layers
        if x is None:
            x = self.embedding(backend, batch)  # [T] -> [T, E]
        for i in layers:
            backend.enter_layer(i, x)
            x = self.layers[i](backend, x, cache, batch)
        if layers.stop < len(self.layers):
            return x
        backend.enter_layer(len(self.layers), x)
        return x if self.final_norm is None else self.final_norm(backend, x)

    def states(self, backend: Backend, x: Any) -> Any:
        """The input of the LM head's product; opt-350m projects it to the embedding's width. [R, E] -> [R, W]"""
        return self.head.states(backend, x)

    def logits(self, backend: Backend, hidden: Any) -> Any:
        """The language model head. [R, W] -> [R, V]"""
        return self.head(backend, hidden)
