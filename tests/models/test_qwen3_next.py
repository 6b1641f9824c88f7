"""Qwen3-Next's configuration: delta nets between attention, experts, and what is refused."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, ParameterError, UnsupportedModelError
from minillm.models import qwen3_next, tensor_shapes

DELTA_NETS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
}

CONFIG: dict[str, Any] = DELTA_NETS | {
    "model_type": "qwen3_next",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "three of six": CONFIG,
    "in the upper layer, tied": CONFIG
    | {
        "mlp_only_layers": [0, 1],
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "linear_conv_kernel_dim": 2,
        "linear_num_value_heads": 2,
    },
    "biases, half rotated": CONFIG
    | {
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "num_key_value_heads": 4,
        "layer_types": ["full_attention", "full_attention", "linear_attention"],
    },
}

PARAMETERS = {"qwen3-next-80b-a3b": 79_674_391_296}
"""As the published checkpoint has them, without the layer that predicts a further token."""


def test_every_fourth_layer_has_attention_unless_config_json_says_otherwise() -> None:
    raw = {name: value for name, value in CONFIG.items() if name != "layer_types"} | {"num_hidden_layers": 5}
    assert qwen3_next.read_config(raw).linear == (True, True, True, False, True)
    assert qwen3_next.read_config(raw | {"full_attention_interval": 2}).linear == (True, False, True, False, True)
    config = qwen3_next.read_config(CONFIG)
    assert config.layer_states == (((3, 96), (4, 8, 16)), (), ((3, 96), (4, 8, 16)))
    assert config.sharded(2).layer_states[0] == ((3, 48), (2, 8, 16))


def test_published_tensors_are_named_as_they_are() -> None:
    shapes = tensor_shapes(qwen3_next.read_config(CONFIG))
    assert shapes["layers.0.linear_attn.in_proj_qkvz.weight"] == (160, 32)
    assert shapes["layers.0.linear_attn.in_proj_ba.weight"] == (8, 32)
    assert shapes["layers.1.self_attn.q_proj.weight"] == (128, 32)
    assert shapes["layers.2.mlp.shared_expert.up_proj.weight"] == (20, 32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, CheckpointError, "full_attention in one layer at least"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "num_hidden_layers 3 entries"),
        ({"layer_types": ["conv"] * 3}, UnsupportedModelError, "layer_types has 'conv'"),
        ({"linear_num_value_heads": 3}, CheckpointError, "3 should be a multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 1}, CheckpointError, "linear_conv_kernel_dim should be at least 2, found 1"),
        ({"attn_output_gate": False}, UnsupportedModelError, "attn_output_gate is false"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        qwen3_next.read_config(CONFIG | change)


def test_ranks_have_whole_key_heads() -> None:
    with pytest.raises(ParameterError, match="4 should divide the model's linear_num_key_heads 2"):
        qwen3_next.read_config(CONFIG).sharded(4)
