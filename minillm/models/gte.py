"""GTE v1.5 and multilingual (Zhang et al., arXiv 2407.19669), and Snowflake's arctic-embed-m-v2.0, of the same shape.

Layers are those of `rotary_encoder.py`, gated by GELU, with biases of attention and of the MLP's second projection.
Published configurations call the family "new".
"""

from collections.abc import Mapping
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..errors import UnsupportedModelError
from .encoder import TextEncoder
from .encoder_heads import MaskedNames
from .parameters import Weights
from .rotary import KINDS
from .rotary_encoder import (
    RotaryEncoderConfig,
    RotaryEncoderNames,
    build_rotary_encoder,
    read_rotary_encoder,
)
from .tensor_names import Names

PUBLISHED = "new"
"""`model_type` of checkpoints with code of their own"""
BASE, PUBLISHED_BASE = 160_000.0, 10_000.0
"""Bases of rotary embedding if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> RotaryEncoderConfig:
    """GTE's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: other positions or norms, scores scaled by the text's length, or an unsupported rotary
            scaling.
    """
    fields, published = Fields(raw), raw.get("model_type") == PUBLISHED
    fields.choice(
        "position_embedding_type", "rope" if published else "absolute", ("rope",) if published else ("absolute", "rope")
    )
    fields.choice("layer_norm_type", "layer_norm", ("layer_norm",))
    for name in ("logn_attention_scale", "logn_attention_clip1"):
        if fields.get(name, False):
            raise UnsupportedModelError(f"config.json: {name} is true; minillm runs scores that no length scales")
    if not fields.get("pack_qkv", True):
        raise UnsupportedModelError("config.json: pack_qkv is false; minillm reads Q, K and V as one tensor")
    return read_rotary_encoder(
        fields,
        "gte",
        base=PUBLISHED_BASE if published else BASE,
        activation="gelu",
        token_types=1,
        bias=True,
        kinds=("default", "ntk") if published else KINDS,
    )


NAMES = Names(
    prefixes=("new.", "gte."),
    left_out=("embeddings.position_ids", "rotary_emb.inv_freq"),
    heads=("lm_head.", "pooler.", "classifier.", "qa_outputs."),
    masked_head="lm_head.dense.weight",
    expert_tensors={"mlp.up_gate_proj.weight": ("mlp.up_proj.weight", "mlp.gate_proj.weight")},
    embedding="embeddings.word_embeddings.weight",
)
"""Tensors of checkpoints: encoder.layer.0.attention.qkv_proj.weight or new.encoder..."""

_PARTS = RotaryEncoderNames(
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer",
    qkv="attention.qkv_proj",
    attention_out="attention.o_proj",
    attention_norm="attn_ln",
    up="mlp.up_proj",
    gate="mlp.gate_proj",
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
    masked=MaskedNames("lm_head.dense", "lm_head.norm", "lm_head.decoder", "lm_head.decoder.bias"),
    masked_activation="gelu",
)


def build(config: RotaryEncoderConfig, weights: Weights, backend: Backend) -> TextEncoder:
    """Build the model."""
    return build_rotary_encoder(config, weights, _PARTS, config.rotary.rotation(backend))
