"""Ministral 3 (Mistral AI, arXiv 2601.08584): Mistral without a window, and with YaRN.

Beyond the original length of YaRN queries are multiplied by 1 + b ln(1 + floor(position / length)), as in Llama 4. That
is 1 up to that length, which is therefore the longest context here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Fields
from .llama import NAMES, TOKENS, LlamaConfig, build, read_kin
from .reading import read_grouped_heads, read_layer_types, read_layers, refuse_other_layers
from .rotary import TABLES, read_rotary, refuse_partial, rope_table

__all__ = ["NAMES", "build", "read_config"]

HEAD_DIM, KV_HEADS, POSITIONS = 128, 8, 262_144
"""Head width, key/value heads and longest context if config.json does not say"""
ROTARY = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384}
ROTARY |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
"""Rotary embedding if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Ministral 3's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    usual: dict[str, Any] = {"num_key_value_heads": KV_HEADS, "max_position_embeddings": POSITIONS}
    tables = [table for name in TABLES if isinstance(table := raw.get(name), dict)]
    if not any({"rope_type", "type", "rope_theta"} & table.keys() for table in tables):
        usual["rope_parameters"] = ROTARY
        raw = {name: value for name, value in raw.items() if name not in TABLES or not isinstance(value, dict)}
    fields = Fields(TOKENS | usual | {name: value for name, value in raw.items() if value is not None})
    refuse_other_layers(fields, windows=True)
    refuse_partial(fields)
    window = None if fields.raw.get("sliding_window") is None else fields.size("sliding_window")
    read_layer_types(fields, ("full_attention" if window is None else "sliding_attention",))
    head_dim = read_grouped_heads(fields, head_dim=HEAD_DIM)["head_dim"]
    rotary, table = read_rotary(fields, head_dim, fields.size("max_position_embeddings")), rope_table(fields)
    if table.get("llama_4_scaling_beta", 0.0):
        original = table.size("original_max_position_embeddings", rotary.longest)
        rotary = replace(rotary, longest=min(rotary.longest, original))
    return read_kin(
        fields,
        "ministral3",
        head_dim=HEAD_DIM,
        windows=(window,) * read_layers(fields),
        rotary=rotary,
        epsilon=fields.number("rms_norm_eps", 1e-5),
    )
