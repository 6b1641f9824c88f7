"""Mistral 4 (Mistral AI, 2026): DeepSeek's latent attention, experts chosen by softmax among the best groups, YaRN.

As in Ministral 3, queries have a factor beyond the original length of YaRN: that is the longest context here.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Fields
from .deepseek_v2 import LatentConfig, build, read_latent
from .glm4_moe import read_shared_experts
from .llama import NAMES as LLAMA_NAMES
from .llama import TOKENS
from .reading import merge_names
from .rotary import TABLES, rope_table

__all__ = ["NAMES", "build", "read_config"]

DEFAULTS = TOKENS | {"max_position_embeddings": 1_048_576, "first_k_dense_replace": 0, "n_shared_experts": 1}
DEFAULTS |= {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "num_attention_heads": 32}
"""Fields that config.json may lack"""
SIZES = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 256, "q_lora_rank": 1024}
"""Widths of latent attention if config.json has none"""
ROTARY = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
ROTARY |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
"""Rotary embedding if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> LatentConfig:
    """Mistral 4's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    named = merge_names(raw, {"n_routed_experts": "num_local_experts"})
    fields = _read_rotary(Fields(DEFAULTS | {name: value for name, value in named.items() if value is not None}))
    experts = read_shared_experts(fields, experts=128, default_width=2048)
    router = replace(experts.pop("router"), sigmoid=False)
    config = read_latent(
        raw,
        fields,
        "mistral4",
        sizes=SIZES,
        kinds=("yarn",),
        interleaved=fields.get("rope_interleave", True),
        normalised=fields.get("norm_topk_prob", True),
        **experts | {"router": router, "corrected": False},
    )
    table, longest = rope_table(fields), config.rotary.longest
    if table.get("llama_4_scaling_beta", 0.0):
        longest = min(longest, table.size("original_max_position_embeddings", longest))
    return replace(config, max_positions=longest, rotary=replace(config.rotary, longest=longest))


def _read_rotary(fields: Fields) -> Fields:
    """The fields with one table of rotary embedding, without its share of a key, which the widths say."""
    table = rope_table(fields)
    numbers: dict[str, Any] = dict(table.raw) or ROTARY
    r, n = (fields.size(name, SIZES[name]) for name in ("qk_rope_head_dim", "qk_nope_head_dim"))
    share = Fields(numbers, table.source).get("partial_rotary_factor", 1.0)
    if math.isclose(share, r / (r + n)):  # as transformers has it, of a whole key
        numbers = {name: value for name, value in numbers.items() if name != "partial_rotary_factor"}
    others = {name: value for name, value in fields.raw.items() if name not in TABLES}
    return Fields(others | {"rope_parameters": numbers}, fields.source)


NAMES = replace(
    LLAMA_NAMES,
    expert_tensors={
        "mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
        "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
    },
)
"""Tensors of checkpoints: model.layers.0.mlp.experts.gate_up_proj, [X, 2 F, E]."""
