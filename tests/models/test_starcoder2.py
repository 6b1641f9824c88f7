"""StarCoder2's configuration."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import starcoder2

CONFIG: dict[str, Any] = {
    "model_type": "starcoder2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "window": CONFIG | {"sliding_window": 9},
    "no biases, untied": CONFIG
    | {"use_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 1, "norm_epsilon": 1e-3},
    "wide heads": CONFIG
    | {"num_key_value_heads": 4, "head_dim": 12, "hidden_act": "gelu", "rope_theta": 500.0, "sliding_window": None},
}

PARAMETERS = {"starcoder2-3b": 3_030_371_328, "starcoder2-7b": 7_173_923_840, "starcoder2-15b": 15_957_889_024}
"""As the published checkpoints have them."""


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    config = starcoder2.read_config({k: v for k, v in CONFIG.items() if not k.endswith(("token_id", "value_heads"))})
    assert (config.windows, config.num_kv_heads, config.tied_head, config.biases) == (
        (None, None),
        2,
        True,
        True,
    )
    assert (config.bos_token_id, config.eos_token_ids) == (50256, (50256,))
    assert (config.activation, config.epsilon) == ("gelu_new", 1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_key_value_heads": 3}, CheckpointError, "4 should be a multiple of num_key_value_heads 3"),
        ({"hidden_size": 33}, CheckpointError, "hidden_size 33 should be a multiple of num_attention_heads 4"),
        ({"head_dim": 7}, CheckpointError, "needs an even width of at least 2, found 7"),
        ({"intermediate_size": None}, CheckpointError, "intermediate_size is missing"),
        ({"sliding_window": 0}, CheckpointError, "sliding_window should be at least 1, found 0"),
        ({"use_bias": 1}, CheckpointError, "use_bias should be true or false, found 1"),
        ({"hidden_act": "mish"}, UnsupportedModelError, "hidden_act is 'mish'; minillm runs 'relu', 'gelu'"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor is 0.5; in this family"),
        ({"layer_types": ["sliding_attention"] * 2}, UnsupportedModelError, "layer_types has 'sliding_attention'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        starcoder2.read_config(CONFIG | change)
