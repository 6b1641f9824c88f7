"""Helium's configuration: rotated pairs side by side in checkpoints."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import helium

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "helium", "head_dim": 8, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": CONFIG,
    "with biases, tied": CONFIG | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "not grouped": CONFIG | {"num_key_value_heads": 4, "rope_theta": 500.0, "rms_norm_eps": 1e-3},
}

PARAMETERS: dict[str, int] = {}


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    config = helium.read_config({k: v for k, v in CONFIG.items() if k != "rms_norm_eps"})
    assert (config.epsilon, config.rotary.base, config.paired, config.tied_head) == (1e-8, 100_000.0, True, False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"head_dim": 16},
            CheckpointError,
            "hidden_size should be num_attention_heads 4 times head_dim 16 in this family, found 32",
        ),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor is 0.5; in this family"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        helium.read_config(CONFIG | change)
