"""ERNIE 4.5's configuration: rotated pairs side by side in checkpoints."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import ernie4_5

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "ernie4_5", "head_dim": 8, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "tied": CONFIG,
    "with biases, untied": CONFIG | {"use_bias": True, "tie_word_embeddings": False, "rope_theta": 100.0},
    "wide heads": CONFIG | {"head_dim": 16, "num_key_value_heads": 4},
}

PARAMETERS: dict[str, int] = {"ernie-4.5-0.3b": 360_748_032}
"""As the published checkpoints have them."""


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    config = ernie4_5.read_config({k: v for k, v in CONFIG.items() if k not in ("num_key_value_heads", "head_dim")})
    assert (config.num_kv_heads, config.head_dim, config.tied_head, config.qkv_bias) == (2, 128, True, False)
    assert config.rotary.base == 500_000.0 and config.paired


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sliding_window": 5}, UnsupportedModelError, "sliding_window is 5; in this family"),
        ({"head_dim": 7}, CheckpointError, "needs an even width of at least 2, found 7"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ernie4_5.read_config(CONFIG | change)
