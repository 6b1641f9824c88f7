"""DeepSeek-V3 and R1 (DeepSeek-AI, arXiv 2412.19437): V2 with experts chosen by sigmoids, a bias and groups.

The layer that predicts a further token is not run.
"""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .deepseek_v2 import NAMES, LatentConfig, build, read_latent, refuse_other_experts
from .glm4_moe import read_shared_experts
from .reading import merge_names

__all__ = ["NAMES", "build", "read_config"]

DEFAULTS = {"bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 4096, "routed_scaling_factor": 2.5}
DEFAULTS |= {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "n_shared_experts": 1}
"""Fields that config.json may lack"""


def read_config(raw: Mapping[str, Any]) -> LatentConfig:
    """DeepSeek-V3's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    named = merge_names(raw, {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"})
    fields = Fields(DEFAULTS | {name: value for name, value in named.items() if value is not None})
    refuse_other_experts(fields, "sigmoid")
    fields.choice("topk_method", "noaux_tc", ("noaux_tc",))
    return read_latent(
        raw,
        fields,
        "deepseek_v3",
        interleaved=fields.get("rope_interleave", True),
        normalised=fields.get("norm_topk_prob", True),
        further_layers=fields.get("num_nextn_predict_layers", 1),
        **read_shared_experts(fields, experts=256, default_width=2048),
    )
