"""ERNIE 4.5's configuration: which layers have experts, and a bias of their choice."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import ernie4_5_moe

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 24,
    "pad_token_id": 0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "a dense layer first": CONFIG,
    "one shared, untied": CONFIG
    | {"moe_layer_start_index": 0, "moe_num_shared_experts": 1, "tie_word_embeddings": False},
    "none shared": CONFIG
    | {"moe_layer_start_index": 0, "moe_layer_end_index": 0, "moe_num_shared_experts": 0, "moe_k": 2},
}

PARAMETERS: dict[str, int] = {"ernie-4.5-21b-a3b": 21_825_437_888}
"""As the published checkpoints have them."""


def test_which_layers_have_experts() -> None:
    change = {"num_hidden_layers": 6, "moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2}
    assert ernie4_5_moe.read_config(CONFIG | change).sparse == (False, True, False, True, False, False)
    assert ernie4_5_moe.read_config(CONFIG).shared_size == 48


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"use_bias": True}, UnsupportedModelError, "use_bias is true; minillm runs this family without biases"),
        ({"moe_layer_start_index": 5}, CheckpointError, "leave no layer with experts"),
        ({"moe_k": 7}, CheckpointError, "moe_k 7 should be at most moe_num_experts 6"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ernie4_5_moe.read_config(CONFIG | change)
