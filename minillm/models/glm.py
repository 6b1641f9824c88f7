"""GLM-4-9B (GLM Team, arXiv 2406.12793): Llama with half of each head rotated, and biases of Q, K and V.

Checkpoints have rotated pairs side by side, and gate and up as one tensor.
"""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .llama import NAMES, LlamaConfig, build, read_kin
from .reading import read_grouped_heads, refuse_other_layers
from .rotary import read_partial_rotary

__all__ = ["NAMES", "build", "read_config", "read_glm"]

TOKENS = {"eos_token_id": [151_329, 151_336, 151_338], "num_key_value_heads": 2}
"""EOS token ids and key/value heads if config.json has none"""
HEAD_DIM = 128
"""Head width D if config.json has none"""
SHARE = 0.5
"""Share of each head that is rotated if config.json does not say"""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """GLM-4's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    return read_glm(Fields(TOKENS | dict(raw)), "glm")


def read_glm(fields: Fields, model_type: str, **switches: Any) -> LlamaConfig:
    """Read the fields that GLM-4-9B and GLM-4-0414 share; `switches` as of `llama.read_kin`.

    Raises:
        As `llama.read_config`.
    """
    refuse_other_layers(fields)
    head_dim = read_grouped_heads(fields, head_dim=HEAD_DIM)["head_dim"]
    config: LlamaConfig = read_kin(
        fields,
        model_type,
        head_dim=HEAD_DIM,
        rotary=read_partial_rotary(fields, head_dim, fields.size("max_position_embeddings", 131_072), share=SHARE),
        epsilon=fields.number("rms_norm_eps", 1.5625e-7),
        qkv_bias=fields.get("attention_bias", True),
        fused_mlp=True,
        paired=True,
        **switches,
    )
    return config
