"""Qwen3.5's text model with experts in each layer, one of which all tokens share: Qwen3.5-35B-A3B and larger."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .mixtral import read_experts
from .qwen3_next import DeltaNetConfig, build, read_delta_nets
from .reading import merge_names
from .tensor_names import Names
from .text_parts import without_mrope

__all__ = ["NAMES", "build", "read_config"]

NAMES = Names(
    prefixes=("model.",),
    left_out=("rotary_emb.inv_freq",),
    expert_tensors={
        ".experts.gate_up_proj": (".experts.*.gate_proj.weight", ".experts.*.up_proj.weight"),
        ".experts.down_proj": (".experts.*.down_proj.weight",),
    },
)
"""Tensors of checkpoints: (model.)layers.0.mlp.experts.gate_up_proj, or each expert's as in `qwen3_next`"""
DEFAULTS = {
    "head_dim": 256,
    "intermediate_size": 512,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "shared_expert_intermediate_size": 512,
}
"""Fields that config.json may lack; no layer has an MLP of `intermediate_size`"""


def read_config(raw: Mapping[str, Any]) -> DeltaNetConfig:
    """The configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    named = merge_names(without_mrope(raw), {"num_experts": "num_local_experts"})
    fields = Fields(DEFAULTS | {name: value for name, value in named.items() if value is not None})
    experts = read_experts(
        fields, "num_experts", experts=256, chosen=8, width="moe_intermediate_size", default_width=512, shared=True
    )
    shared = fields.size("shared_expert_intermediate_size")
    return read_delta_nets(fields, "qwen3_5_moe_text", normalised=True, shared_size=shared, shared_gate=True, **experts)
