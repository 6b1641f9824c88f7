"""Llama's configuration and tensor table."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import llama

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": CONFIG,
    "tied, with biases": CONFIG
    | {"num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "wide heads": CONFIG
    | {"num_key_value_heads": 4, "head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "rope_theta": 500.0},
}

PARAMETERS = {
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
}
"""As transformers counts them in the published checkpoints."""


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_key_value_heads": 3}, CheckpointError, "4 should be a multiple of num_key_value_heads 3"),
        (
            {"hidden_size": 33},
            CheckpointError,
            "hidden_size 33 should be a multiple of num_attention_heads 4",
        ),
        ({"head_dim": 7}, CheckpointError, "needs an even width of at least 2, found 7"),
        ({"intermediate_size": None}, CheckpointError, "intermediate_size is missing"),
        ({"hidden_act": "mish"}, UnsupportedModelError, "hidden_act is 'mish'; minillm runs 'relu', 'gelu'"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor is 0.5; in this family"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            UnsupportedModelError,
            "rope_scaling: rope_type is 'longrope'; minillm runs 'default', 'linear', 'dynamic', 'yarn', 'llama3'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        llama.read_config(CONFIG | change)
