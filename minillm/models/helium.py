"""Helium (Kyutai, 2025): Llama whose checkpoints have rotated pairs side by side."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from ..errors import CheckpointError
from .llama import NAMES, TOKENS, LlamaConfig, build, read_kin
from .reading import read_grouped_heads, refuse_other_layers

__all__ = ["NAMES", "build", "read_config"]

HEAD_DIM = 128
"""Head width D if config.json has none"""
BASE = 100_000.0
"""Base of rotary embedding if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Helium's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(TOKENS | {"num_key_value_heads": 20} | dict(raw))
    refuse_other_layers(fields)
    heads = read_grouped_heads(fields, head_dim=HEAD_DIM)
    if heads["num_heads"] * heads["head_dim"] != fields.size("hidden_size"):
        raise CheckpointError(
            f"config.json: hidden_size should be num_attention_heads {heads['num_heads']} times head_dim "
            f"{heads['head_dim']} in this family, found {fields.raw['hidden_size']}"
        )
    return read_kin(
        fields,
        "helium",
        head_dim=HEAD_DIM,
        base=BASE,
        epsilon=fields.number("rms_norm_eps", 1e-8),
        qkv_bias=fields.get("attention_bias", False),
        mlp_bias=fields.get("mlp_bias", False),
        paired=True,
    )
