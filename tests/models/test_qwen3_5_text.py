"""Qwen3.5's text model: its configuration alone and inside that of a model of text and images."""

from typing import Any

import pytest

from minillm.errors import UnsupportedModelError
from minillm.models import config_of, qwen3_5_text, tensor_shapes

from .test_qwen3_next import DELTA_NETS

CONFIG: dict[str, Any] = DELTA_NETS | {"model_type": "qwen3_5_text"}

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": CONFIG,
    "M-RoPE, tied": CONFIG
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 3,
    },
    "biases": CONFIG
    | {"attention_bias": True, "num_key_value_heads": 4, "layer_types": ["linear_attention", *["full_attention"] * 2]},
}

PARAMETERS = {"qwen3.5-0.8b": 752_393_024, "qwen3.5-27b": 26_895_998_464}
"""Of the text models, as their configurations say."""


def test_the_text_model_of_a_model_of_text_and_images_is_read() -> None:
    text = CONFIGS["M-RoPE, tied"]
    inside = config_of({"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True})
    assert inside == config_of(text)
    shapes = tensor_shapes(inside)
    assert shapes["layers.0.linear_attn.in_proj_qkv.weight"] == (2 * 32 + 64, 32)
    assert shapes["layers.0.linear_attn.in_proj_a.weight"] == (4, 32)


def test_experts_are_another_family() -> None:
    with pytest.raises(UnsupportedModelError, match="num_experts is 6: this family is run without experts"):
        qwen3_5_text.read_config(CONFIG | {"num_experts": 6})
