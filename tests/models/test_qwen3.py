"""Qwen3's configuration: norms of heads, and a head's width of its own."""

from typing import Any

from minillm.models import qwen3

from . import test_llama

CONFIG = test_llama.CONFIG | {"model_type": "qwen3", "head_dim": 12}

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": CONFIG,
    "with biases, tied": CONFIG | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "window in the upper layer": CONFIG | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
}

PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
}
"""As the published checkpoints have them."""


def test_heads_have_128_numbers_unless_config_json_says_otherwise() -> None:
    assert qwen3.read_config({k: v for k, v in CONFIG.items() if k != "head_dim"}).head_dim == 128
    assert qwen3.read_config(CONFIG).head_dim == 12
