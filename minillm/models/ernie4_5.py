"""ERNIE 4.5, the dense models (Baidu, 2025): Llama whose checkpoints have rotated pairs side by side."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .llama import NAMES, TOKENS, LlamaConfig, build, read_kin
from .reading import refuse_other_layers

__all__ = ["NAMES", "build", "read_config"]

HEAD_DIM = 128
"""Head width D if config.json has none"""
BASE = 500_000.0
"""Base of rotary embedding if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """ERNIE 4.5's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(TOKENS | {"num_key_value_heads": 2} | dict(raw))
    refuse_other_layers(fields)
    bias = fields.get("use_bias", False)
    return read_kin(
        fields,
        "ernie4_5",
        head_dim=HEAD_DIM,
        tied_head=True,
        base=BASE,
        epsilon=fields.number("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        paired=True,
    )
