"""Command R7B's configuration: windows with rotation, full attention without."""

from typing import Any

import pytest

from minillm.errors import CheckpointError
from minillm.models import cohere2

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "cohere2", "sliding_window": 7, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "window then full": CONFIG | {"layer_types": ["sliding_attention", "full_attention"]},
    "untied, with biases": CONFIG
    | {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "logit_scale": 0.5,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "windows": CONFIG | {"num_key_value_heads": 4, "rope_theta": 500.0},
}

PARAMETERS: dict[str, int] = {"command-r7b": 8_028_033_024}
"""As the published checkpoints have them."""


def test_three_of_four_layers_have_a_window_and_rotate() -> None:
    config = cohere2.read_config(CONFIG | {"num_hidden_layers": 5})
    assert (config.windows, config.rotated) == ((7, 7, 7, None, 7), (True, True, True, False, True))
    assert config.mixed_layers and config.rotary.base == 10_000.0
    assert cohere2.read_config(CONFIG | {"sliding_window_pattern": 2}).windows == (7, None)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sliding_window": None}, CheckpointError, "sliding_window is missing"),
        (
            {"layer_types": ["sliding_attention"]},
            CheckpointError,
            "layer_types should have num_hidden_layers 2 entries",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        cohere2.read_config(CONFIG | change)
