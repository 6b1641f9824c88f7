"""Qwen2-MoE and Qwen1.5-MoE (arXiv 2407.10671, section 2.2.2): Qwen2 with experts, and one that all tokens share.

The shared expert's result is multiplied by the sigmoid of a product of its own.
"""

from collections.abc import Mapping
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..layers.experts import ExpertMLP
from ..layers.mlp import GatedMLP
from . import llama
from .decoder import Decoder
from .llama import NAMES, read_kin
from .mixtral import ExpertConfig, expert_mlp, read_experts
from .parameters import Weights
from .qwen3_moe import sparse_layers
from .reading import merge_names, read_layer_kinds, read_layers, refuse_other_layers

__all__ = ["NAMES", "build", "read_config"]

DEFAULTS = {"num_key_value_heads": 16, "shared_expert_intermediate_size": 5632, "sliding_window": 4096}
"""Fields that config.json may lack"""
WINDOWED = 28
"""Layers of which every other may have a window, if config.json does not say"""


def read_config(raw: Mapping[str, Any]) -> ExpertConfig:
    """Qwen2-MoE's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    named = merge_names(raw, {"num_experts": "num_local_experts"})
    fields = Fields(DEFAULTS | {name: value for name, value in named.items() if value is not None})
    refuse_other_layers(fields, windows=True)
    layers, window = read_layers(fields), None
    if fields.get("use_sliding_window", False):
        window = fields.size("sliding_window")
    most = fields.get("max_window_layers", WINDOWED)
    slides = read_layer_kinds(fields, lambda i: window is not None and i % 2 == 0 and i < most)
    return read_kin(
        fields,
        "qwen2_moe",
        kind=ExpertConfig,
        windows=tuple(window if slide else None for slide in slides),
        qkv_bias=fields.get("qkv_bias", True),
        normalised=fields.get("norm_topk_prob", False),
        shared_size=fields.size("shared_expert_intermediate_size"),
        shared_gate=True,
        **read_experts(
            fields,
            "num_experts",
            experts=60,
            chosen=4,
            width="moe_intermediate_size",
            default_width=1408,
            sparse=sparse_layers(fields, layers),
            shared=True,
        ),
    )


def build(config: ExpertConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    return llama.build(config, weights, backend, mlp=_mlp)


def _mlp(config: Any, weights: Weights, i: int) -> GatedMLP | ExpertMLP:
    if not config.sparse[i]:
        return llama.gated_mlp(config, weights, i)
    names: dict[str, Any] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "shared": "shared_expert"}
    return expert_mlp(config, weights.at("mlp"), **names)
