"""Qwen2-MoE's configuration: a shared expert with a factor of its own, windows in every other layer."""

from typing import Any

import pytest

from minillm.errors import CheckpointError
from minillm.models import qwen2_moe, tensor_shapes

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "three of six": CONFIG,
    "in the upper layer, normalised": CONFIG
    | {"decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False, "num_experts_per_tok": 2},
    "not in the upper layer, window": CONFIG
    | {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 9, "tie_word_embeddings": True},
}

PARAMETERS: dict[str, int] = {"qwen1.5-moe-a2.7b": 14_315_784_192}
"""As the published checkpoints have them."""


def test_every_other_layer_has_a_window() -> None:
    config = qwen2_moe.read_config(
        CONFIG | {"num_hidden_layers": 5, "use_sliding_window": True, "max_window_layers": 3}
    )
    assert config.windows == (4096, None, 4096, None, None)
    shapes = tensor_shapes(config)
    assert shapes["layers.0.mlp.shared_expert.up_proj.weight"] == (28, 32)
    assert shapes["layers.0.mlp.shared_expert_gate.weight"] == (1, 32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mlp_only_layers": [0, 1]}, CheckpointError, "leave no layer with experts"),
        ({"num_experts_per_tok": 7}, CheckpointError, "num_experts_per_tok 7 should be at most num_experts 6"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        qwen2_moe.read_config(CONFIG | change)
