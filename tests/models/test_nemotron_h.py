"""Nemotron-H's configuration: the part that each layer has, and what is refused."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import nemotron_h

CONFIG: dict[str, Any] = {
    "model_type": "nemotron_h",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "layer_norm_epsilon": 0.05,  # results near zero are normed too: their rounding is not to be seen
}

CONFIGS: dict[str, dict[str, Any]] = {
    "one of each": CONFIG,
    "one group, biases": CONFIG
    | {
        "n_group": 1,
        "norm_topk_prob": False,
        "n_groups": 1,
        "use_bias": True,
        "mlp_bias": True,
        "use_conv_bias": False,
    },
    "wide heads": CONFIG
    | {"layers_block_type": ["mlp", "full_attention", "linear_attention", "linear_attention"], "head_dim": 16}
    | {"mlp_hidden_act": "silu", "conv_kernel": 3, "num_key_value_heads": 4},
}

PARAMETERS = {"nemotron-h-8b": 8_100_852_736, "nemotron-3-nano-30b-a3b": 31_577_940_288}
"""As transformers counts them in the published checkpoints, with the buffers of 23 routers' biases."""


def test_published_names_of_fields_are_read() -> None:
    raw = {name: value for name, value in CONFIG.items() if name != "layers_block_type"}
    config = nemotron_h.read_config(raw | {"hybrid_override_pattern": "M*E-", "num_hidden_layers": 4})
    assert config == nemotron_h.read_config(CONFIG)
    assert (config.kinds, config.layers_with_keys()) == (("mamba", "attention", "moe", "mlp"), [1])
    assert config.layer_states == (((3, 72), (4, 6, 12)), (), (), ())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layers_block_type": ["rwkv", "full_attention"]}, UnsupportedModelError, "layers_block_type has 'rwkv'"),
        ({"moe_latent_size": 16}, UnsupportedModelError, "moe_latent_size is 16; minillm runs experts of the whole"),
        ({"n_shared_experts": 2}, UnsupportedModelError, "n_shared_experts is 2; minillm runs 1 here"),
        ({"mlp_hidden_act": "silu"}, UnsupportedModelError, "mlp_hidden_act is 'silu'; minillm runs experts without"),
        ({"num_experts_per_tok": 9}, CheckpointError, "num_experts_per_tok 9 should be at most n_routed_experts 8"),
        ({"layers_block_type": ["mlp"]}, CheckpointError, "should have attention in one layer at least"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias is true; minillm runs this family without"),
        ({"time_step_limit": [0.0, 1.0]}, UnsupportedModelError, "minillm runs steps of time_step_min and more"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        nemotron_h.read_config(CONFIG | change)
