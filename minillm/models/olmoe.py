"""OLMoE (Muennighoff et al., arXiv 2409.02060): Llama with experts, and RMS norm of all queries and of all keys."""

from collections.abc import Mapping
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..errors import UnsupportedModelError
from . import llama
from .decoder import Decoder
from .llama import NAMES, read_kin
from .mixtral import ExpertConfig, read_experts
from .parameters import Weights
from .qwen3_moe import named_mlp
from .reading import merge_names, refuse_other_layers

__all__ = ["NAMES", "build", "read_config"]

DEFAULTS = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}
"""Fields that config.json may lack"""


def read_config(raw: Mapping[str, Any]) -> ExpertConfig:
    """OLMoE's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(DEFAULTS | merge_names(raw, {"num_experts": "num_local_experts"}))
    refuse_other_layers(fields)
    if fields.raw.get("clip_qkv") is not None:
        raise UnsupportedModelError(
            f"config.json: clip_qkv is {fields.raw['clip_qkv']!r:.60}; minillm clips no queries, keys and values"
        )
    bias = fields.get("attention_bias", False)
    return read_kin(
        fields,
        "olmoe",
        kind=ExpertConfig,
        qkv_bias=bias,
        out_bias=bias,
        projection_norms=True,
        normalised=fields.get("norm_topk_prob", False),
        **read_experts(fields, "num_experts", experts=64, chosen=8),
    )


def build(config: ExpertConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    return llama.build(config, weights, backend, mlp=named_mlp)
