"""Seed-OSS (ByteDance, 2025): Llama with biases of Q, K and V, and a head width of its own."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .llama import NAMES, LlamaConfig, build, read_kin
from .reading import refuse_other_layers

__all__ = ["NAMES", "build", "read_config"]

HEAD_DIM = 128
"""Head width D if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Seed-OSS's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields({"bos_token_id": 0, "eos_token_id": 2, "num_key_value_heads": 8} | dict(raw))
    refuse_other_layers(fields)
    return read_kin(
        fields,
        "seed_oss",
        head_dim=HEAD_DIM,
        qkv_bias=fields.get("attention_bias", True),
        out_bias=fields.get("attention_out_bias", False),
        mlp_bias=fields.get("mlp_bias", False),
    )
