"""MPNet (Song et al., arXiv 2004.09297): RoBERTa's layers with T5's bias of scores by distance, the same in each layer.

    x = norm(tokens[ids] + positions[i])
    x = norm(x + attention(x));  x = norm(x + mlp(x))      in each layer

A classification reads the first token, <s>: logits = tanh(x W_dense + b) W_out + b.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..errors import UnsupportedModelError
from ..reference.attention import AttentionSpec
from .distance_bias import bias_by_distance
from .encoder import EncoderConfig, EncoderNames, TextEncoder, build_encoder, encoder_qkv, read_encoder
from .encoder_heads import ROBERTA_MASKED
from .parameters import Weights
from .tensor_names import Names

BUCKETS, MAX_DISTANCE = 32, 128
"""Biases of a head, and the distance from which on there is one: not by config.json, whose number is the table's"""
PADDING = 1
"""The token before whose successor's number the positions begin, whatever pad_token_id says"""


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """MPNet's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: a decoder, or another number of buckets.
    """
    buckets = Fields(raw).size("relative_attention_num_buckets", BUCKETS)
    if buckets != BUCKETS:
        raise UnsupportedModelError(
            f"config.json: relative_attention_num_buckets is {buckets}; minillm runs {BUCKETS}, which transformers "
            "computes with whatever it is"
        )
    config = read_encoder(dict(raw) | {"pad_token_id": PADDING}, "mpnet", padded_positions=True)
    return replace(config, token_types=0)


NAMES = Names(
    prefixes=("mpnet.",),
    left_out=("embeddings.position_ids",),
    heads=("lm_head.", "pooler.", "classifier.", "qa_outputs."),
    masked_head="lm_head.dense.weight",
    embedding="embeddings.word_embeddings.weight",
)
"""Tensors of checkpoints: encoder.layer.0.output.dense.weight or mpnet.encoder..."""

_PARTS = EncoderNames(
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    attention_out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    head_dense="classifier.dense",
    head_out="classifier.out_proj",
    masked=ROBERTA_MASKED,
    masked_activation="gelu",
)


def build(config: EncoderConfig, weights: Weights, backend: Backend) -> TextEncoder:
    """Build the model."""
    bias = bias_by_distance(weights.at("encoder"), backend, config.num_heads, BUCKETS, MAX_DISTANCE, both=True)
    spec = AttentionSpec(config.head_dim**-0.5, causal=False, bias=bias)
    return build_encoder(config, weights, _PARTS, lambda layer: (encoder_qkv(config, layer, _PARTS), spec))
