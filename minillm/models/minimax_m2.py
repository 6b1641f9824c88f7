"""MiniMax-M2 (MiniMax, 2025): experts chosen by sigmoids; norms of all queries and of all keys; partial rotation."""

from collections.abc import Mapping
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..layers.experts import ExpertMLP
from ..reference.experts import RouterSpec
from . import llama
from .decoder import Decoder
from .llama import NAMES, read_kin
from .mixtral import ExpertConfig, expert_mlp, read_experts
from .parameters import Weights
from .reading import merge_names, read_grouped_heads, refuse_other_layers
from .rotary import read_partial_rotary

__all__ = ["NAMES", "build", "read_config"]

DEFAULTS = {"bos_token_id": 200_034, "eos_token_id": 200_020, "num_key_value_heads": 8, "head_dim": 128}
"""Fields that config.json may lack"""
BASE = 5_000_000.0
"""Base of rotary embedding if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> ExpertConfig:
    """MiniMax-M2's configuration from config.json; `rotary_dim` says how much of each head is rotated.

    Raises:
        As `llama.read_config`.
    """
    named = merge_names(raw, {"num_local_experts": "num_experts"})
    fields = Fields(DEFAULTS | {name: value for name, value in named.items() if value is not None})
    refuse_other_layers(fields)
    head_dim, positions = read_grouped_heads(fields)["head_dim"], fields.size("max_position_embeddings", 196_608)
    share = fields.size("rotary_dim", head_dim, most=head_dim) / head_dim
    return read_kin(
        fields,
        "minimax_m2",
        kind=ExpertConfig,
        rotary=read_partial_rotary(fields, head_dim, positions, share=share, base=BASE),
        projection_norms=True,
        normalised=True,
        router=RouterSpec(sigmoid=True),
        corrected=True,
        **read_experts(fields, "num_local_experts", experts=256, chosen=8),
    )


def build(config: ExpertConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    return llama.build(config, weights, backend, mlp=_mlp)


def _mlp(config: Any, weights: Weights, i: int) -> ExpertMLP:
    names: dict[str, Any] = {"gate": "w1", "up": "w3", "down": "w2", "correction": "e_score_correction_bias"}
    return expert_mlp(config, weights.at("block_sparse_moe"), **names)
