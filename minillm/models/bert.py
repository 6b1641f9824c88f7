"""BERT (Devlin et al., arXiv 1810.04805), and the many encoders of its shape: MiniLM, BGE, E5, GTE, cross-encoders.

    x = norm(tokens[ids] + positions[i] + types[t])
    x = norm(x + attention(x));  x = norm(x + mlp(x))      in each layer

A classification reads the first token, [CLS]: logits = tanh(x W_pooler + b) W_out + b.
"""

from collections.abc import Mapping
from typing import Any

from ..backends.operations import Backend
from .encoder import EncoderConfig, EncoderNames, TextEncoder, build_encoder, read_encoder
from .parameters import Weights
from .tensor_names import Names


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """BERT's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: a decoder, attention to another text, or relative positions.
    """
    return read_encoder(raw, "bert")


NAMES = Names(
    prefixes=("bert.",),
    left_out=("embeddings.position_ids",),
    heads=("cls.", "pooler.", "classifier.", "qa_outputs."),
    masked_head="cls.predictions.transform.dense.weight",
    renamed=((".gamma", ".weight"), (".beta", ".bias")),
    embedding="embeddings.word_embeddings.weight",
)
"""Tensors of checkpoints: encoder.layer.0.output.dense.weight or bert.encoder...; in old ones a norm has a gamma."""


def build(config: EncoderConfig, weights: Weights, backend: Backend) -> TextEncoder:
    """Build the model."""
    return build_encoder(config, weights, EncoderNames())
