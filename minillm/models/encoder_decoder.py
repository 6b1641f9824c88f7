"""The encoder-decoder transformer: an encoder that reads the source once, and a decoder with cross-attention to it."""

from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.pages import Pages
from ..batch import Batch
from ..layers.audio import AudioEmbedding
from ..layers.block import Block
from ..layers.cross_attention import CrossBlock
from ..layers.embedding import Embedding
from ..layers.norm import Norm
from .decoder import Decoder


@dataclass(frozen=True, eq=False)
class Encoder:
    """Embedding, blocks whose attention looks both ways, and the final norm if there is one."""

    embedding: Embedding | AudioEmbedding
    layers: tuple[Block, ...]
    """All keep their keys and values in layer 0 of the cache, each for as long as it runs"""
    final_norm: Norm | None

    def forward(self, backend: Backend, batch: Batch, cache: Pages) -> Any:
        """The last hidden state of every token, after the final norm. Each text is in the batch whole. [T] -> [T, E]"""
        x = self.embedding(backend, batch)  # [T] -> [T, E]
        for i, layer in enumerate(self.layers):
            backend.enter_layer(i, x)
            x = layer(backend, x, cache, batch)
        backend.enter_layer(len(self.layers), x)
        return x if self.final_norm is None else self.final_norm(backend, x)


@dataclass(frozen=True, eq=False)
class EncoderDecoder(Decoder):
    """A complete model (see `base.Model`): `forward`, `states` and `logits` are the decoder's."""

    layers: tuple[CrossBlock, ...]  # type: ignore[assignment]
    encoder: Encoder

    def encode(self, backend: Backend, batch: Batch, cache: Pages) -> Any:
        """Run the encoder over sources, and store the keys and values of each decoder layer's cross-attention.

        Args:
            backend: the backend
            batch: each source as a sequence, whole, in its own pages
            cache: the decoder's; the encoder's layers use layer 0 of the sources' pages before that is overwritten

        Returns:
            The encoder's result. [T] -> [T, E]
        """
        x = self.encoder.forward(backend, batch, cache)  # [T] -> [T, E]
        for layer in self.layers:
            layer.cross.store(backend, x, cache, batch)
            backend.memory.arena.give_back()  # what the cache has now
        return x
