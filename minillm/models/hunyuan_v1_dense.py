"""Hunyuan, the dense models (Tencent, 2025): Llama with norms of each query and key head, after rotation."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Fields
from . import llama
from .llama import TOKENS, LlamaConfig, build, read_kin
from .reading import read_grouped_heads, refuse_other_layers
from .rotary import BASE, RotaryConfig, from_tables, read_rotary, refuse_partial, rope_table

__all__ = ["NAMES", "build", "read_config"]

MOST = 1e9
"""Upper bound of the factor of the rotary base"""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Hunyuan's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(TOKENS | dict(raw))
    refuse_other_layers(fields)
    refuse_partial(fields)
    bias, head_dim = fields.get("attention_bias", False), read_grouped_heads(fields)["head_dim"]
    return read_kin(
        fields,
        "hunyuan_v1_dense",
        rotary=from_tables(fields, lambda table: _read_rotary(table, head_dim)),
        epsilon=fields.number("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
        norms_follow_rotation=True,
    )


def _read_rotary(fields: Fields, head_dim: int) -> RotaryConfig:
    """Rotary embedding; of kind "dynamic" with an `alpha`, the base is larger, whatever the length of the text."""
    table, positions = rope_table(fields), fields.size("max_position_embeddings", 2048)
    alpha = table.get("alpha", 0.0)
    if not alpha or table.raw.get("rope_type", table.raw.get("type")) != "dynamic":
        return read_rotary(fields, head_dim, positions)
    base = table.number("rope_theta", fields.number("rope_theta", BASE, above=1), above=1)
    stretched = base * table.number("alpha", most=MOST) ** (head_dim / (head_dim - 2))
    return read_rotary(Fields({"rope_theta": stretched}, fields.source), head_dim, positions)


NAMES = replace(
    llama.NAMES,
    renamed=((".query_layernorm.weight", ".q_norm.weight"), (".key_layernorm.weight", ".k_norm.weight")),
)
"""Tensors of checkpoints: Llama's, and norms of heads under names of their own."""
