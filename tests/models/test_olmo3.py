"""OLMo 3's configuration: windows in three of four layers, each kind with its rotary embedding."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import olmo3

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "olmo3", "sliding_window": 7, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "window then full": CONFIG | {"layer_types": ["sliding_attention", "full_attention"]},
    "tables, tied": CONFIG
    | {
        "num_key_value_heads": 4,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 700.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "full": CONFIG | {"layer_types": ["full_attention"] * 2, "head_dim": 16},
}

PARAMETERS: dict[str, int] = {"olmo-3-7b": 7_298_011_136}
"""As the published checkpoints have them."""


def test_three_of_four_layers_have_a_window_and_scaling_is_that_of_the_others() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}
    config = olmo3.read_config(CONFIG | {"num_hidden_layers": 5, "rope_scaling": scaling})
    assert config.windows == (7, 7, 7, None, 7)
    assert config.local is not None and config.local.scale == 1 < config.rotary.scale
    assert config.local.base == config.rotary.base == 500_000.0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sliding_window": None}, CheckpointError, "sliding_window is missing"),
        ({"rope_parameters": {"rope_theta": 5.0}}, UnsupportedModelError, "rope_parameters has 'rope_theta'; expected"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        olmo3.read_config(CONFIG | change)
