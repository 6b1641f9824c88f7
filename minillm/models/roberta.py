"""RoBERTa (Liu et al., arXiv 1907.11692): BERT with other training, one token type, and positions from 2 on.

A classification reads the first token, <s>: logits = tanh(x W_dense + b) W_out + b.
"""

from collections.abc import Mapping
from typing import Any

from ..backends.operations import Backend
from .encoder import EncoderConfig, EncoderNames, TextEncoder, build_encoder, read_encoder
from .encoder_heads import ROBERTA_MASKED
from .parameters import Weights
from .tensor_names import Names


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """RoBERTa's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: a decoder, attention to another text, or relative positions.
    """
    return read_encoder(raw, "roberta", padded_positions=True)


NAMES = Names(
    prefixes=("roberta.",),
    left_out=("embeddings.position_ids",),
    heads=("lm_head.", "pooler.", "classifier.", "qa_outputs."),
    masked_head="lm_head.dense.weight",
    renamed=((".gamma", ".weight"), (".beta", ".bias")),
    embedding="embeddings.word_embeddings.weight",
)
"""Tensors of checkpoints: encoder.layer.0.output.dense.weight or roberta.encoder..."""

_PARTS = EncoderNames(
    head_dense="classifier.dense",
    head_out="classifier.out_proj",
    masked=ROBERTA_MASKED,
    masked_activation="gelu",
)


def build(config: EncoderConfig, weights: Weights, backend: Backend) -> TextEncoder:
    """Build the model."""
    return build_encoder(config, weights, _PARTS)
