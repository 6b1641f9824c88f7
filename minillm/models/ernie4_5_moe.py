"""ERNIE 4.5, the mixtures of experts (Baidu, 2025): ERNIE 4.5 with experts, and shared ones, in some layers.

A bias of each expert is added to its share of the softmax for the choice.
"""

from collections.abc import Mapping
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.experts import ExpertMLP
from ..layers.mlp import GatedMLP
from . import llama
from .decoder import Decoder
from .llama import NAMES, TOKENS, read_kin
from .mixtral import ExpertConfig, expert_mlp, read_experts
from .parameters import Weights
from .reading import merge_names, read_layers, refuse_other_layers

__all__ = ["NAMES", "build", "read_config"]

DEFAULTS = {"num_key_value_heads": 4, "moe_num_shared_experts": 2}
"""Fields that config.json may lack"""
BASE = 500_000.0
"""Base of rotary embedding if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> ExpertConfig:
    """ERNIE 4.5's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    named = merge_names(raw, {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"})
    fields = Fields(TOKENS | DEFAULTS | {name: value for name, value in named.items() if value is not None})
    refuse_other_layers(fields)
    if fields.get("use_bias", False):
        raise UnsupportedModelError(f"{fields.source}: use_bias is true; minillm runs this family without biases")
    sizes = read_experts(
        fields,
        "moe_num_experts",
        experts=64,
        chosen=6,
        width="moe_intermediate_size",
        default_width=1536,
        sparse=_sparse_layers(fields),
        chosen_name="moe_k",
        shared=True,
    )
    shared = fields.get("moe_num_shared_experts", 0)
    if not 0 <= shared <= sizes["num_experts"]:
        raise CheckpointError(f"{fields.source}: moe_num_shared_experts should be 0 or more, found {shared!s:.60}")
    return read_kin(
        fields,
        "ernie4_5_moe",
        kind=ExpertConfig,
        tied_head=True,
        base=BASE,
        epsilon=fields.number("rms_norm_eps", 1e-5),
        paired=True,
        normalised=True,
        corrected=True,
        shared_size=shared * sizes["expert_size"],
        **sizes,
    )


def _sparse_layers(fields: Fields) -> tuple[bool, ...]:
    layers, step = read_layers(fields), fields.size("moe_layer_interval", 1)
    first, last = fields.get("moe_layer_start_index", 1), fields.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    sparse = tuple(first <= i <= last and (i + 1) % step == 0 for i in range(layers))
    if not any(sparse):
        raise CheckpointError(
            f"{fields.source}: moe_layer_start_index {first!s:.40}, moe_layer_end_index {last!s:.40} and "
            f"moe_layer_interval {step} leave no layer with experts"
        )
    return sparse


def build(config: ExpertConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    return llama.build(config, weights, backend, mlp=_mlp)


def _mlp(config: Any, weights: Weights, i: int) -> GatedMLP | ExpertMLP:
    if not config.sparse[i]:
        return llama.gated_mlp(config, weights, i)
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    correction = "moe_statics.e_score_correction_bias"
    return expert_mlp(config, weights.at("mlp"), correction=correction, published=(1, config.num_experts), **names)
