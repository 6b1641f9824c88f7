"""Falcon-H1's configuration: its factors, the norm of Mamba-2, and what is refused."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, ModelError, UnsupportedModelError
from minillm.models import falcon_h1

CONFIG: dict[str, Any] = {
    "model_type": "falcon_h1",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.05,  # results near zero are normed too: their rounding is not to be seen
    "pad_token_id": None,
    "mamba_d_ssm": 24,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.5,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.75,
    "key_multiplier": 0.6,
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 1.2, 0.7, 1.1, 0.5],
    "mlp_multipliers": [0.8, 0.6],
}

CONFIGS: dict[str, dict[str, Any]] = {
    "all factors": CONFIG,
    "norm before the gate, biases": CONFIG
    | {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_n_groups": 1, "mamba_d_ssm": None}
    | {"mamba_expand": 1, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True}
    | {"attention_in_multiplier": 1.0, "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.0}
    | {"mlp_multipliers": [0.8, 0.7], "tie_word_embeddings": True},
    "norm after the gate, no factors": {
        name: value for name, value in CONFIG.items() if not name.endswith(("multiplier", "multipliers"))
    }
    | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_conv": 3, "mamba_conv_bias": False}
    | {"head_dim": 16, "rope_theta": 500.0},
}

PARAMETERS = {"falcon-h1-0.5b": 521_411_104}
"""As transformers counts them in the published checkpoints."""


def test_factors_are_those_of_columns_and_of_the_residual_stream() -> None:
    config = falcon_h1.read_config(CONFIG)
    assert config.embedding_scale == pytest.approx(1.5 / 0.7)
    assert config.epsilon == pytest.approx(0.05 / 0.7**2)
    assert config.qkv_factors == pytest.approx((1.25, 1.25 * 0.6, 1.25 * 0.75 / 0.7))
    assert config.mamba_factors == pytest.approx((0.72, 0.96, 0.56, 0.88, 0.4))
    assert config.mlp_factors == pytest.approx((0.8, 0.6 / 0.7))
    assert (config.layers_with_keys(), config.layer_states) == ([0, 1], (((3, 72), (4, 6, 12)),) * 2)


def test_fields_of_older_checkpoints_that_say_what_all_layers_have_are_read() -> None:
    older = CONFIG | {"attn_layer_indices": None, "mamba_use_mlp": True, "mamba_d_head": 6}
    assert falcon_h1.read_config(older) == falcon_h1.read_config(CONFIG)
    assert falcon_h1.read_config(CONFIG | {"attn_layer_indices": [0, 1]}) == falcon_h1.read_config(CONFIG)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"attn_layer_indices": [1]},
            UnsupportedModelError,
            "attn_layer_indices is .1.; minillm runs attention",
        ),
        ({"mamba_use_mlp": False}, UnsupportedModelError, "mamba_use_mlp is false; minillm runs layers with an MLP"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias is true and attention_in_multiplier is 1.25"),
        ({"mamba_proj_bias": True}, UnsupportedModelError, "mamba_proj_bias is true and ssm_in_multiplier is 0.8"),
        ({"mlp_bias": True}, UnsupportedModelError, "mlp_bias is true and mlp_multipliers is 0.6; .* where it is 0.7"),
        ({"ssm_multipliers": [1.0, 2.0]}, CheckpointError, "ssm_multipliers should be 5 numbers, found"),
        ({"mlp_multipliers": [1.0, "2"]}, CheckpointError, r"mlp_multipliers\[1\] should be a finite number"),
        ({"mamba_d_ssm": 30}, CheckpointError, "mamba_n_heads 4 should divide the 30 channels of Mamba"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_by_name(
    change: dict[str, Any], error: type[ModelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        falcon_h1.read_config(CONFIG | change)
