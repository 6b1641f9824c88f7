"""Qwen3-MoE's configuration: which layers have experts, and how wide those are."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import qwen3_moe, tensor_shapes

from . import test_qwen3

CONFIG = test_qwen3.CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "three of six": CONFIG,
    "in the upper layer, not normalised": CONFIG
    | {"decoder_sparse_step": 2, "norm_topk_prob": False, "attention_bias": True, "num_experts_per_tok": 2},
    "not in the upper layer, window": CONFIG
    | {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 9, "tie_word_embeddings": True},
}

PARAMETERS = {"qwen3-30b-a3b": 30_532_122_624}
"""As the published checkpoint has them."""


def test_each_layer_has_experts_or_one_mlp() -> None:
    assert qwen3_moe.read_config(CONFIG).sparse == (True, True)
    config = qwen3_moe.read_config(CONFIG | {"decoder_sparse_step": 2})
    assert (config.sparse, config.mixed_layers) == ((False, True), True)
    shapes = tensor_shapes(config)
    assert shapes["layers.0.mlp.up_proj.weight"] == (40, 32)
    assert shapes["layers.1.mlp.experts.5.up_proj.weight"] == (24, 32)
    assert "layers.0.mlp.gate.weight" not in shapes
    assert qwen3_moe.read_config(CONFIG | {"mlp_only_layers": [0]}) == config


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mlp_only_layers": [0, 1]}, CheckpointError, "leave no layer with experts"),
        ({"mlp_only_layers": ["0"]}, CheckpointError, "mlp_only_layers should be numbers of layers, found '0'"),
        ({"num_experts_per_tok": 7}, CheckpointError, "num_experts_per_tok 7 should be at most num_experts 6"),
        ({"num_local_experts": 8}, CheckpointError, "num_experts is 6 and num_local_experts, its other name, 8"),
        (
            {"shared_expert_intermediate_size": 24},
            UnsupportedModelError,
            "shared_expert_intermediate_size is 24: in this family minillm runs no experts shared by all tokens",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_experts_are_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        qwen3_moe.read_config(CONFIG | change)
