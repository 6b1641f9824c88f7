"""nomic-bert (Nussbaum et al., arXiv 2402.01613), the encoder of nomic-embed-text: no biases but the norms'.

Layers are those of `rotary_encoder.py`, gated by SiLU. Texts longer than in training may have dynamically scaled rotary
frequencies (`rotary_scaling_factor`).
"""

from collections.abc import Mapping
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..errors import UnsupportedModelError
from .encoder import TextEncoder
from .encoder_heads import MaskedNames
from .parameters import Weights
from .reading import merge_names
from .rotary_encoder import (
    RotaryEncoderConfig,
    RotaryEncoderNames,
    build_rotary_encoder,
    read_rotary_encoder,
)
from .tensor_names import Names

BASE = 1000.0
"""Base of rotary embedding if config.json has none"""
_PUBLISHED = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
"""transformers' name of a field -> its name in configurations published before"""
_GATES = {"swiglu": "silu", "geglu": "gelu"}
_USUAL: dict[str, Any] = {
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "num_experts": 0,
    "moe_every_n_layers": 0,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": 0.0,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_rms_norm": False,
}
"""Fields of the published configurations, and the one value that is run"""


def read_config(raw: Mapping[str, Any]) -> RotaryEncoderConfig:
    """nomic-bert's configuration from config.json, by transformers' names of the fields or the published ones.

    Raises:
        CheckpointError: a field is missing or invalid, or has both names and two values.
        UnsupportedModelError: a decoder, experts, biases, or another unsupported feature.
    """
    fields = Fields(raw)
    for name, usual in _USUAL.items():
        if (value := fields.get(name, usual)) != usual:
            raise UnsupportedModelError(f"config.json: {name} is {value!r:.60}; in this family minillm runs {usual}")
    merged, original = merge_names(raw, _PUBLISHED), 0
    if "n_embd" in raw:
        merged["hidden_act"] = _GATES[fields.choice("activation_function", "gelu", tuple(_GATES))]
        multiple = fields.size("pad_vocab_size_multiple", 1)
        merged["vocab_size"] = -(-fields.size("vocab_size") // multiple) * multiple  # as its table is padded
        merged["type_vocab_size"] = fields.get("type_vocab_size", 0)
    if fields.raw.get("rotary_scaling_factor") is not None:
        original = fields.size("max_trained_positions", 2048)
        merged["rope_scaling"] = {"rope_type": "dynamic", "factor": raw["rotary_scaling_factor"]}
    merged["max_position_embeddings"] = merged["max_position_embeddings"] or 2048
    return read_rotary_encoder(
        Fields(merged), "nomic_bert", base=BASE, activation="silu", token_types=2, bias=False, original=original
    )


NAMES = Names(
    prefixes=("nomic_bert.", "bert."),
    left_out=("embeddings.position_ids", "rotary_emb.inv_freq"),
    heads=("cls.", "pooler.", "classifier.", "qa_outputs."),
    masked_head="cls.predictions.transform.dense.weight",
    embedding="embeddings.word_embeddings.weight",
)
"""Tensors of checkpoints: encoder.layers.0.attn.Wqkv.weight or bert.encoder..."""

_PARTS = RotaryEncoderNames(
    embedding_norm="emb_ln",
    layer="encoder.layers",
    qkv="attn.Wqkv",
    attention_out="attn.out_proj",
    attention_norm="norm1",
    up="mlp.fc11",
    gate="mlp.fc12",
    down="mlp.fc2",
    mlp_norm="norm2",
    masked=MaskedNames(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.layer_norm",
        "cls.predictions.decoder",
        "cls.predictions.bias",
    ),
)


def build(config: RotaryEncoderConfig, weights: Weights, backend: Backend) -> TextEncoder:
    """Build the model."""
    return build_rotary_encoder(config, weights, _PARTS, config.rotary.rotation(backend))
