"""SmolLM3's configuration: layers without rotary embedding, some with a window."""

from typing import Any

import numpy as np
import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import smollm3

from ..tiny import logits_of, model_of, runner_of
from . import test_llama

CONFIG = test_llama.CONFIG | {"model_type": "smollm3", "no_rope_layer_interval": 2, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "every second": CONFIG | {"num_key_value_heads": 4},
    "listed, with biases, untied": CONFIG
    | {"no_rope_layers": [0, 1], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "window": CONFIG | {"use_sliding_window": True, "sliding_window": 7, "num_key_value_heads": 4},
}

PARAMETERS = {"smollm3-3b": 3_075_098_624}
"""As the published checkpoint has them."""


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    raw = {k: v for k, v in CONFIG.items() if not k.endswith(("_interval", "value_heads"))}
    config = smollm3.read_config(raw | {"num_hidden_layers": 9})
    assert config.rotated == (True, True, True, False) * 2 + (True,)
    assert (config.num_kv_heads, config.tied_head, config.bos_token_id) == (4, True, 128_000)
    assert config.rotary.frequencies[1] == pytest.approx(2e6**-0.25)
    assert smollm3.read_config(raw | {"num_key_value_heads": None}).num_kv_heads == 4


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None, None)),
        ({"sliding_window": 5}, (None, None)),  # only with use_sliding_window
        ({"use_sliding_window": True}, (None, None)),
        ({"use_sliding_window": True, "sliding_window": 5}, (None, 5)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (5, None),
        ),
    ],
)
def test_windows_of_each_layer(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert smollm3.read_config(CONFIG | fields).windows == windows


def test_without_rotation_a_layer_sees_no_order() -> None:
    """Of one layer, the last token's logits do not depend on the order of those before it."""
    line, other = [5, 9, 3, 7, 7, 2], [7, 3, 9, 7, 5, 2]
    for rotated in (0, 1):
        runner = runner_of(model_of(CONFIG | {"num_hidden_layers": 1, "no_rope_layers": [rotated]}))
        difference = np.abs(logits_of(runner, line)[-1] - logits_of(runner, other)[-1]).max()
        assert (difference > 1e-2) == bool(rotated), difference


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"no_rope_layers": [1]}, CheckpointError, "no_rope_layers should have 0 or 1 for each of num_hidden_layers 2"),
        ({"no_rope_layers": [1, 2]}, CheckpointError, r"num_hidden_layers 2, found \[1, 2\]"),
        ({"no_rope_layer_interval": 0}, CheckpointError, "no_rope_layer_interval should be at least 1, found 0"),
        ({"layer_types": ["sliding_attention"] * 2}, UnsupportedModelError, "layer_types has 'sliding_attention'"),
        ({"use_sliding_window": True, "sliding_window": 0}, CheckpointError, "sliding_window should be at least 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        smollm3.read_config(CONFIG | change)
