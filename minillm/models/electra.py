"""ELECTRA's discriminator and generator (Clark et al., arXiv 2003.10555): BERT, whose embeddings may be narrower.

    x = norm(tokens[ids] + positions[i] + types[t]) W_in + b       the projection only where the widths differ
    x = norm(x + attention(x));  x = norm(x + mlp(x))      in each layer

A classification reads the first token, [CLS]: logits = gelu(x W_dense + b) W_out + b.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from .encoder import EncoderConfig, EncoderNames, TextEncoder, build_encoder, read_encoder
from .encoder_heads import MaskedNames
from .parameters import Weights
from .tensor_names import Names

EMBEDDING_WIDTH = 128
"""Width of the embeddings if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """ELECTRA's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: a decoder, attention to another text, or relative positions.
    """
    config, width = read_encoder(raw, "electra"), Fields(raw).size("embedding_size", EMBEDDING_WIDTH)
    return replace(config, embedding_width=0 if width == config.hidden_size else width)


NAMES = Names(
    prefixes=("electra.",),
    left_out=("embeddings.position_ids",),
    heads=("discriminator_predictions.", "generator_predictions.", "generator_lm_head.", "classifier.", "qa_outputs."),
    masked_head="generator_predictions.dense.weight",
    embedding="embeddings.word_embeddings.weight",
)
"""Tensors of checkpoints: encoder.layer.0.output.dense.weight or electra.encoder..."""

_PARTS = EncoderNames(
    head_dense="classifier.dense",
    head_out="classifier.out_proj",
    head_activation="gelu",
    masked=MaskedNames(
        "generator_predictions.dense",
        "generator_predictions.LayerNorm",
        "generator_lm_head",
        "generator_lm_head.bias",
    ),
    masked_activation="gelu",
)


def build(config: EncoderConfig, weights: Weights, backend: Backend) -> TextEncoder:
    """Build the model."""
    return build_encoder(config, weights, _PARTS)
