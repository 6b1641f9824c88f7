"""Ministral 3's configuration: YaRN, and a context in which queries have no factor."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import ministral3

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "ministral3", "head_dim": 8, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "yarn": CONFIG
    | {
        "max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "plain, tied": CONFIG
    | {
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "llama_4_scaling_beta": 0.0,
            "original_max_position_embeddings": 64,
        },
    },
    "wide heads, window": CONFIG
    | {
        "head_dim": 16,
        "num_key_value_heads": 4,
        "sliding_window": 7,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    },
}

PARAMETERS: dict[str, int] = {"ministral-3-3b": 3_429_006_336}
"""As the published checkpoints have them."""


def test_the_longest_context_is_the_one_in_which_queries_have_no_factor() -> None:
    assert ministral3.read_config(CONFIGS["yarn"]).max_positions == 64
    raw = CONFIG | {"max_position_embeddings": None, "rope_parameters": None, "num_key_value_heads": None}
    config = ministral3.read_config(raw | {"num_attention_heads": 16})
    assert (config.max_positions, config.num_kv_heads, config.rotary.base) == (16_384, 8, 1e6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor is 0.5; in this family"),
        ({"sliding_window": 0}, CheckpointError, "sliding_window should be at least 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ministral3.read_config(CONFIG | change)
