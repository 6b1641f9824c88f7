"""InternLM3 (Shanghai AI Laboratory, 2025): Llama, with other names of the fields for biases.

transformers has no InternLM2: its published checkpoints run code of their own.
"""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from ..errors import UnsupportedModelError
from .llama import NAMES, TOKENS, LlamaConfig, build, read_kin
from .reading import merge_names, refuse_other_layers

__all__ = ["NAMES", "build", "read_config"]

HEAD_DIM = 128
"""Head width D if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """InternLM3's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    raw = merge_names(raw, {"attention_bias": "qkv_bias", "mlp_bias": "bias"})
    fields = Fields(TOKENS | {"num_key_value_heads": 2} | raw)
    refuse_other_layers(fields)
    bias, mlp_bias = fields.get("attention_bias", False), fields.get("mlp_bias", False)
    if bias != mlp_bias:
        raise UnsupportedModelError(
            f"config.json: attention_bias (qkv_bias) is {bias} and mlp_bias (bias) is {mlp_bias}; minillm runs "
            "InternLM3 where they are the same, as transformers does"
        )
    return read_kin(
        fields,
        "internlm3",
        head_dim=HEAD_DIM,
        epsilon=fields.number("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=mlp_bias,
    )
