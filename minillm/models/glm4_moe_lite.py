"""GLM-4.7-Flash (Z.ai, 2026): DeepSeek-V3 with other defaults. The layer that predicts a further token is not run."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from ..errors import CheckpointError
from .deepseek_v2 import NAMES, LatentConfig, build, read_latent, refuse_other_experts
from .glm4_moe import read_shared_experts
from .reading import merge_names, read_layers

__all__ = ["NAMES", "build", "read_config"]

DEFAULTS = {"bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 202_752, "routed_scaling_factor": 1.8}
DEFAULTS |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 4}
"""Fields that config.json may lack"""
SIZES = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "kv_lora_rank": 512, "q_lora_rank": 768}
"""Widths of latent attention if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> LatentConfig:
    """GLM-4.7-Flash's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    named = merge_names(raw, {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"})
    fields = Fields(DEFAULTS | {name: value for name, value in named.items() if value is not None})
    refuse_other_experts(fields, "sigmoid")
    fields.choice("topk_method", "noaux_tc", ("noaux_tc",))
    sparse = _sparse_layers(fields)
    return read_latent(
        raw,
        fields,
        "glm4_moe_lite",
        sizes=SIZES,
        interleaved=fields.get("rope_interleave", True),
        epsilon=fields.number("rms_norm_eps", 1e-5),
        normalised=fields.get("norm_topk_prob", True),
        further_layers=fields.get("num_nextn_predict_layers", 1),
        **read_shared_experts(fields, experts=64, default_width=1536, sparse=sparse),
    )


def _sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Whether each layer has experts: by `mlp_layer_types`, or all but the first.

    Raises:
        CheckpointError: the list is not of "dense" and "sparse", one for each layer, or `first_k_dense_replace` says
            something else.
    """
    layers = read_layers(fields)
    kinds = fields.get("mlp_layer_types", []) or ["dense", *["sparse"] * (layers - 1)]
    if len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds) or "sparse" not in kinds:
        raise CheckpointError(
            f"{fields.source}: mlp_layer_types should be 'dense' or 'sparse' for each of {layers} layers, and 'sparse' "
            f"for one at least, found {kinds!s:.60}"
        )
    sparse = tuple(kind == "sparse" for kind in kinds)
    dense = fields.get("first_k_dense_replace", sparse.index(True))
    if sparse != tuple(i >= dense for i in range(layers)) and fields.raw.get("first_k_dense_replace") is not None:
        raise CheckpointError(
            f"{fields.source}: first_k_dense_replace {dense} and mlp_layer_types differ: leave one out"
        )
    return sparse
