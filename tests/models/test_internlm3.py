"""InternLM3's configuration: other names of the fields for biases."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import internlm3

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "internlm3", "head_dim": 8, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": CONFIG,
    "with biases, tied": CONFIG | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "wide heads": CONFIG | {"head_dim": 16, "num_key_value_heads": 4, "rope_theta": 500.0},
}

PARAMETERS: dict[str, int] = {"internlm3-8b": 8_804_241_408}
"""As the published checkpoints have them."""


def test_either_name_of_a_bias_is_read() -> None:
    config = internlm3.read_config(CONFIG | {"qkv_bias": True, "bias": True})
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, True, True)
    assert config == internlm3.read_config(CONFIG | {"attention_bias": True, "mlp_bias": True})
    assert internlm3.read_config({k: v for k, v in CONFIG.items() if k != "head_dim"}).head_dim == 128


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"qkv_bias": True, "bias": False},
            UnsupportedModelError,
            "attention_bias \\(qkv_bias\\) is True and mlp_bias \\(bias\\) is False; minillm",
        ),
        ({"qkv_bias": True, "attention_bias": False}, CheckpointError, "its other name, True: leave one out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        internlm3.read_config(CONFIG | change)
