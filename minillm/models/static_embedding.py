"""Static embeddings (model2vec): a table of vectors of tokens. There are no layers: a text's vector is the mean.

Source: sentence-transformers 6.2, `sentence_transformer/modules/static_embedding.py`.
"""

from collections.abc import Mapping
from typing import Any

from ..backends.operations import Backend
from ..config import Fields, ModelConfig
from ..layers.embedding import Embedding
from ..layers.encoder_head import NoHead
from .encoder import TextEncoder
from .parameters import Weights
from .tensor_names import Names

LONGEST = 2**20
"""Tokens of a text at most; nothing in the model bounds it"""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration, from the sizes of the table.

    Raises:
        CheckpointError: one is missing.
    """
    fields = Fields(raw)
    width = fields.size("hidden_size")
    return ModelConfig(
        model_type="static_embedding",
        hidden_size=width,
        num_layers=0,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        intermediate_size=width,
        vocab_size=fields.size("vocab_size"),
        max_positions=LONGEST,
        bidirectional=True,
        output="states",
    )


NAMES = Names(prefixes=(), embedding="embedding.weight")


def build(config: ModelConfig, weights: Weights, backend: Backend) -> TextEncoder:
    """Build the model."""
    table = weights.table("embedding", config.vocab_size, config.hidden_size, "vocabulary")
    return TextEncoder(config.sharded(weights.ranks), Embedding(table), (), None, NoHead())
