"""gpt-oss (OpenAI, arXiv 2508.10925): experts with biases and a clamped gate, and attention with sinks.

Every second layer, from the first on, has a window. Queries, keys, values, the router and the experts have biases. A
head's sink is one more logit of each softmax (`reference/attention.py`). Published checkpoints have the experts of a
layer as one tensor, in MXFP4 (`formats/schemes/mxfp4.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..errors import UnsupportedModelError
from ..layers.experts import ExpertMLP
from ..reference.gates import CLAMPED, CLAMPED_LIMIT, CLAMPED_SLOPE
from . import llama
from .decoder import Decoder
from .llama import read_kin
from .mixtral import ExpertConfig, expert_mlp, read_experts
from .parameters import Weights
from .reading import merge_names, read_layer_kinds, refuse_other_layers
from .rotary import KINDS, TABLES
from .tensor_names import Names

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary scaling if config.json has none"""
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
"""Fields that config.json may lack"""
BASE, WINDOW, HEAD_DIM = 150_000.0, 128, 64
"""Base of rotary embedding, sliding window and D if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> ExpertConfig:
    """gpt-oss's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    named = merge_names(raw, {"num_local_experts": "num_experts"})
    fields = Fields(DEFAULTS | {name: value for name, value in named.items() if value is not None})
    if not any(fields.get(name, {}) for name in TABLES):
        fields = Fields({**fields.raw, "rope_scaling": YARN})
    for name in TABLES:
        table = Fields(fields.get(name, {}), f"{fields.source}, {name}")
        if table.raw and table.raw.get("rope_type") is None:  # a kind that is not said would be none, unlike without it
            table.choice("type", "", KINDS)
    for name, usual in (("swiglu_alpha", CLAMPED_SLOPE), ("swiglu_limit", CLAMPED_LIMIT)):
        if (value := fields.number(name, usual)) != usual:
            raise UnsupportedModelError(f"{fields.source}: {name} is {value}; minillm runs {usual}")
    refuse_other_layers(fields, windows=True)
    kinds = read_layer_kinds(fields, lambda i: i % 2 == 0)
    window = fields.size("sliding_window", None if "sliding_window" in raw else WINDOW) if any(kinds) else None
    bias = fields.get("attention_bias", True)
    config = read_kin(
        fields,
        "gpt_oss",
        kind=ExpertConfig,
        windows=tuple(window if sliding else None for sliding in kinds),
        head_dim=HEAD_DIM,
        base=BASE,
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        normalised=True,
        expert_bias=True,
        **read_experts(fields, "num_local_experts", experts=128, chosen=4),
    )
    return replace(config, activation=CLAMPED)


NAMES = Names(
    prefixes=("model.",),
    left_out=("rotary_emb.inv_freq",),
    stacked=(("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))),
)
"""Tensors of checkpoints: (model.)layers.0.mlp.experts.gate_up_proj, of all experts."""


def build(config: ExpertConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    return llama.build(config, weights, backend, mlp=_mlp)


def _mlp(config: Any, weights: Weights, i: int) -> ExpertMLP:
    return expert_mlp(config, weights.at("mlp"), router="router", gate="gate_proj", up="up_proj", down="down_proj")
