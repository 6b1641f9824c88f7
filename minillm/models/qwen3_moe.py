"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with a mixture of experts in some or all layers."""

from collections.abc import Mapping
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..errors import CheckpointError
from ..layers.experts import ExpertMLP
from ..layers.mlp import GatedMLP
from . import llama
from .decoder import Decoder
from .llama import NAMES, read_kin
from .mixtral import ExpertConfig, expert_mlp, read_experts
from .parameters import Weights
from .reading import merge_names, read_layer_types, read_layers, refuse_other_layers

__all__ = ["NAMES", "build", "named_mlp", "read_config", "sparse_layers"]

WINDOW = 4096
"""Sliding window if config.json has none and asks for one"""


def read_config(raw: Mapping[str, Any]) -> ExpertConfig:
    """Qwen3-MoE's configuration from config.json.

    Layer i has experts unless it is in `mlp_only_layers`, or i + 1 is no multiple of `decoder_sparse_step`.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(merge_names(raw, {"num_experts": "num_local_experts"}))
    refuse_other_layers(fields, windows=True)
    layers, window = read_layers(fields), None
    if fields.get("use_sliding_window", False) and fields.raw.get("sliding_window", WINDOW) is not None:
        window = fields.size("sliding_window", WINDOW)
    read_layer_types(fields, ("full_attention" if window is None else "sliding_attention",))
    bias = fields.get("attention_bias", False)
    return read_kin(
        fields,
        "qwen3_moe",
        kind=ExpertConfig,
        windows=(window,) * layers,
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
        normalised=fields.get("norm_topk_prob", False),
        **read_experts(
            fields,
            "num_experts",
            experts=128,
            chosen=8,
            width="moe_intermediate_size",
            default_width=768,
            sparse=sparse_layers(fields, layers),
        ),
    )


def sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts: as `read_config` says.

    Raises:
        CheckpointError: a field is invalid, or none has.
    """
    step, dense = fields.size("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    for layer in dense:
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise CheckpointError(f"config.json: mlp_only_layers should be numbers of layers, found {layer!r:.60}")
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if not any(sparse):
        raise CheckpointError("config.json: mlp_only_layers and decoder_sparse_step leave no layer with experts")
    return sparse


def build(config: ExpertConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    return llama.build(config, weights, backend, mlp=named_mlp)


def named_mlp(config: Any, weights: Weights, i: int) -> GatedMLP | ExpertMLP:
    """The MLP of layer i, or its experts, by the names of Qwen and OLMoE."""
    if not config.sparse[i]:
        return llama.gated_mlp(config, weights, i)
    return expert_mlp(config, weights.at("mlp"), gate="gate_proj", up="up_proj", down="down_proj")
