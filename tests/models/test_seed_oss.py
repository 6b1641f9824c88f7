"""Seed-OSS's configuration: biases by fields of their own, wide heads."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import seed_oss

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "seed_oss", "head_dim": 16, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "with biases": CONFIG,
    "other biases, tied": CONFIG
    | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "all biases": CONFIG | {"attention_out_bias": True, "num_key_value_heads": 4, "head_dim": 8, "rope_theta": 500.0},
}

PARAMETERS: dict[str, int] = {"seed-oss-36b": 36_151_104_512}
"""As the published checkpoints have them."""


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    raw = {k: v for k, v in CONFIG.items() if k not in ("num_key_value_heads", "head_dim")} | {"num_attention_heads": 8}
    config = seed_oss.read_config(raw)
    assert (config.num_kv_heads, config.head_dim, config.bos_token_id, config.eos_token_ids) == (8, 128, 0, (2,))
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, False, False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sliding_window": 5}, UnsupportedModelError, "sliding_window is 5; in this family"),
        ({"num_key_value_heads": 3}, CheckpointError, "4 should be a multiple of num_key_value_heads 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        seed_oss.read_config(CONFIG | change)
