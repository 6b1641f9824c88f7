"""Gemma's configuration: Gemma 2 with fewer norms."""

from typing import Any

import pytest

from minillm.errors import UnsupportedModelError
from minillm.models import gemma

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "gemma", "head_dim": 12, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "gelu is its approximation": CONFIG | {"hidden_act": "gelu"},
    "untied, with biases": CONFIG | {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 1},
    "silu": CONFIG | {"num_key_value_heads": 4, "hidden_act": "silu", "head_dim": 8, "rope_theta": 500.0},
}

PARAMETERS: dict[str, int] = {"gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896}
"""As the published checkpoints have them."""


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    raw = {k: v for k, v in CONFIG.items() if k not in ("head_dim", "num_key_value_heads", "rms_norm_eps")}
    config = gemma.read_config(raw | {"num_attention_heads": 16})
    assert (config.num_kv_heads, config.head_dim, config.query_scalar, config.epsilon) == (16, 256, 256.0, 1e-6)
    assert (config.activation, config.tied_head, config.score_cap) == ("gelu_new", True, None)
    assert gemma.read_config(CONFIG | {"hidden_act": "gelu"}).activation == "gelu_new"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional_attention is true; minillm"),
        ({"sliding_window": 5}, UnsupportedModelError, "sliding_window is 5; in this family"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gemma.read_config(CONFIG | change)
