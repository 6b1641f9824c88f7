"""Qwen2's configuration: biases, and windows in some layers."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import qwen2

from . import test_llama

CONFIG = test_llama.CONFIG | {"model_type": "qwen2"}

CONFIGS: dict[str, dict[str, Any]] = {
    "window in the upper layer": CONFIG | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "tied": CONFIG | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "yarn": CONFIG
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 1000000.0,
        }
    },
}

PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
}
"""As the published checkpoints have them."""


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None, None)),
        ({"sliding_window": 5}, (None, None)),  # only with use_sliding_window
        ({"use_sliding_window": True, "sliding_window": 5}, (None, None)),  # from layer 28 on
        ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, (None, 5)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None, None)),
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
    assert qwen2.read_config(CONFIG | fields).windows == windows


def test_other_layers_are_refused_by_name() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 5}
    with pytest.raises(
        UnsupportedModelError, match="layer_types has 'linear_attention'; minillm runs 'full_attention', 's"
    ):
        qwen2.read_config(CONFIG | windows | {"layer_types": ["full_attention", "linear_attention"]})
    with pytest.raises(UnsupportedModelError, match="layer_types has 'sliding_attention'; minillm runs 'full_att"):
        qwen2.read_config(CONFIG | {"layer_types": ["full_attention", "sliding_attention"]})  # without a window
    with pytest.raises(CheckpointError, match="layer_types should have num_hidden_layers 2 entries"):
        qwen2.read_config(CONFIG | {"layer_types": ["full_attention"]})
    with pytest.raises(UnsupportedModelError, match="num_experts is 8: this family is run without experts"):
        qwen2.read_config(CONFIG | {"num_experts": 8})
