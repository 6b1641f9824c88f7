"""The configuration of LFM2's mixtures: MLPs in the first layers, experts chosen by sigmoids, and what is refused."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import lfm2_moe

from . import test_lfm2

CONFIG: dict[str, Any] = test_lfm2.CONFIG | {
    "model_type": "lfm2_moe",
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
del CONFIG["block_multiple_of"]

CONFIGS: dict[str, dict[str, Any]] = {
    "three of six": CONFIG,
    "scaled, not normalised, tied": CONFIG
    | {"norm_topk_prob": False, "routed_scaling_factor": 1.5, "use_expert_bias": False, "tie_word_embeddings": True}
    | {"layer_types": ["full_attention", "full_attention", "conv"], "num_dense_layers": 0},
    "wide convolutions with biases": CONFIG
    | {"conv_L_cache": 5, "conv_bias": True, "num_key_value_heads": 4, "num_dense_layers": 2},
}

PARAMETERS = {"lfm2-8b-a1b": 8_339_930_560}
"""As transformers counts them in the published checkpoint, with the buffers of 22 layers' biases."""


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    names = ("num_dense_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size")
    config = lfm2_moe.read_config({name: value for name, value in CONFIG.items() if name not in names})
    assert (config.sparse, config.num_experts, config.experts_per_token) == ((False, False, True), 32, 4)
    assert (config.intermediate_size, config.expert_size) == (7168, 1792)
    assert config.router.sigmoid and config.corrected and config.normalised


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_experts_per_tok": 7}, CheckpointError, "num_experts_per_tok 7 should be at most num_experts 6"),
        ({"num_dense_layers": 3}, CheckpointError, "num_dense_layers should be from 0 to num_hidden_layers 3 - 1"),
        ({"n_shared_experts": 1}, UnsupportedModelError, "n_shared_experts is 1: in this family minillm runs no"),
        ({"layer_types": ["conv"] * 3}, CheckpointError, "full_attention in one layer at least"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        lfm2_moe.read_config(CONFIG | change)
