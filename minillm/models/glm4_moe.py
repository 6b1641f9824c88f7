"""GLM-4.5 and GLM-4.6 (GLM-4.5 Team, arXiv 2508.06471): Llama with experts chosen by sigmoids, and shared ones.

The first layers have one MLP each. Half of each head is rotated, and the large models have norms of each query and key
head. The layer that predicts a further token is not run.
"""

from collections.abc import Mapping
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..errors import CheckpointError
from . import llama
from .decoder import Decoder
from .llama import NAMES, read_kin
from .mixtral import ExpertConfig, read_experts, read_router
from .parameters import Weights
from .qwen3_moe import named_mlp
from .reading import merge_names, read_grouped_heads, read_layers, refuse_other_layers
from .rotary import read_partial_rotary

__all__ = ["NAMES", "build", "read_config", "read_shared_experts"]

DEFAULTS = {"num_key_value_heads": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}
"""Fields that config.json may lack"""
SHARE = 0.5
"""Share of each head that is rotated if config.json does not say"""


def read_config(raw: Mapping[str, Any]) -> ExpertConfig:
    """GLM-4.5's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    names = {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"}
    named = merge_names(raw, names)
    fields = Fields(DEFAULTS | {name: value for name, value in named.items() if value is not None})
    refuse_other_layers(fields)
    head_dim = read_grouped_heads(fields)["head_dim"]
    return read_kin(
        fields,
        "glm4_moe",
        kind=ExpertConfig,
        rotary=read_partial_rotary(fields, head_dim, fields.size("max_position_embeddings", 131_072), share=SHARE),
        epsilon=fields.number("rms_norm_eps", 1e-5),
        qkv_bias=fields.get("attention_bias", False),
        head_norms=fields.get("use_qk_norm", False),
        normalised=fields.get("norm_topk_prob", True),
        further_layers=fields.get("num_nextn_predict_layers", 1),
        **read_shared_experts(fields, experts=128, default_width=1408),
    )


def read_shared_experts(
    fields: Fields, *, experts: int | None, default_width: int, sparse: tuple[bool, ...] | None = None
) -> dict[str, Any]:
    """Experts chosen by sigmoids, with shared ones, after `first_k_dense_replace` layers: fields of `ExpertConfig`.

    `sparse`: whether each layer has experts, where the family says it otherwise.

    Raises:
        As `mixtral.read_experts`; CheckpointError also if no layer has experts.
    """
    layers, dense = read_layers(fields), fields.get("first_k_dense_replace", 0)
    if not 0 <= dense < layers:
        raise CheckpointError(
            f"{fields.source}: first_k_dense_replace should be from 0 to num_hidden_layers {layers} - 1, "
            f"found {dense!s:.60}"
        )
    sizes = read_experts(
        fields,
        "n_routed_experts",
        experts=experts or 0,
        chosen=8,
        width="moe_intermediate_size",
        default_width=default_width,
        sparse=sparse or tuple(i >= dense for i in range(layers)),
        shared=True,
    )
    shared = fields.get("n_shared_experts", 0)
    if not 0 <= shared <= sizes["num_experts"]:
        raise CheckpointError(f"{fields.source}: n_shared_experts should be 0 or more, found {shared!s:.60}")
    router = read_router(fields, sizes["num_experts"])
    return sizes | {"shared_size": shared * sizes["expert_size"], "router": router, "corrected": True}


def build(config: ExpertConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    return llama.build(config, weights, backend, mlp=named_mlp)
