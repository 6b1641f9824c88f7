"""EXAONE 4's configuration: windows with rotation, full attention without."""

from typing import Any

import pytest

from minillm.errors import CheckpointError
from minillm.models import exaone4

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "exaone4", "sliding_window": 7, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "window then full": CONFIG | {"layer_types": ["sliding_attention", "full_attention"]},
    "full, tied": CONFIG | {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    "windows": CONFIG | {"num_key_value_heads": 4, "rope_theta": 500.0, "sliding_window_pattern": 3},
}

PARAMETERS: dict[str, int] = {"exaone-4.0-1.2b": 1_279_391_488}
"""As the published checkpoints have them."""


def test_with_a_window_the_other_layers_do_not_rotate() -> None:
    config = exaone4.read_config(CONFIG | {"num_hidden_layers": 5})
    assert (config.windows, config.rotated) == ((7, 7, 7, None, 7), (True, True, True, False, True))
    assert config.mixed_layers and config.head_norms
    plain = exaone4.read_config(CONFIG | {"sliding_window": None})
    assert (plain.windows, plain.rotated, plain.mixed_layers) == ((None, None), (True, True), False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"sliding_window": None, "layer_types": ["sliding_attention", "full_attention"]},
            CheckpointError,
            "layer_types has layers with a window, and sliding_window is null",
        ),
        ({"attention_bias": True}, CheckpointError, "attention_bias is true; EXAONE 4 has no biases"),
        (
            {"sliding_window_pattern": "LG"},
            CheckpointError,
            "sliding_window_pattern should be a whole number, found 'LG'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        exaone4.read_config(CONFIG | change)
