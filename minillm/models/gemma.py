"""Gemma (Gemma Team, arXiv 2403.08295): Gemma 2 without soft caps, windows and norms after attention and MLP."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .gemma2 import HEADS, NAMES, TOKENS, GemmaConfig, build, read_gemma, refuse_bidirectional
from .reading import read_activation, read_grouped_heads, read_layers, refuse_other_layers
from .rotary import read_rotary, refuse_partial

__all__ = ["NAMES", "build", "read_config"]


def read_config(raw: Mapping[str, Any]) -> GemmaConfig:
    """Gemma's configuration from config.json; "gelu" there means its approximation by tanh, as in transformers.

    Raises:
        As `gemma2.read_config`.
    """
    fields = Fields(TOKENS | {"num_key_value_heads": 16} | dict(raw))
    refuse_other_layers(fields)
    refuse_bidirectional(fields)
    refuse_partial(fields)
    layers, head_dim = read_layers(fields), read_grouped_heads(fields, **HEADS)["head_dim"]
    rotary = read_rotary(fields, head_dim, fields.size("max_position_embeddings", 8192))
    activation = read_activation(fields, "hidden_act", "gelu_pytorch_tanh")
    return read_gemma(
        fields,
        "gemma",
        max_positions=rotary.longest,
        keys_follow_length=rotary.stretch is not None,
        activation="gelu_new" if activation == "gelu" else activation,
        query_scalar=float(head_dim),
        rotaries=(rotary,) * layers,
        windows=(None,) * layers,
        output_norms=False,
    )
