"""GLM-4-9B's configuration: half of each head is rotated."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import glm

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "glm", "head_dim": 8, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "half of each head": CONFIG,
    "without biases, tied": CONFIG
    | {"attention_bias": False, "tie_word_embeddings": True, "partial_rotary_factor": 0.75, "head_dim": 16},
    "not grouped": CONFIG | {"num_key_value_heads": 4, "rope_theta": 500.0},
}

PARAMETERS: dict[str, int] = {"glm-4-9b": 9_399_951_360}
"""As the published checkpoints have them."""


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    left_out = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
    config = glm.read_config({k: v for k, v in CONFIG.items() if k not in left_out})
    assert (config.num_kv_heads, config.head_dim, len(config.rotary.frequencies)) == (2, 128, 32)
    assert (config.epsilon, config.max_positions, config.qkv_bias, config.out_bias) == (1.5625e-7, 131_072, True, False)
    assert config.eos_token_ids == (151_329, 151_336, 151_338)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"partial_rotary_factor": 1.5}, CheckpointError, "partial_rotary_factor should be at most 1"),
        ({"sliding_window": 5}, UnsupportedModelError, "sliding_window is 5; in this family"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        glm.read_config(CONFIG | change)
