"""Phi-2's configuration: one norm for attention and MLP, half of each head rotated, a head with a bias."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import phi

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "phi", "num_key_value_heads": 4, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "half of each head": CONFIG,
    "grouped, tied": CONFIG | {"num_key_value_heads": 2, "tie_word_embeddings": True, "partial_rotary_factor": 0.25},
    "relu": CONFIG | {"hidden_act": "relu", "partial_rotary_factor": 1.0, "layer_norm_eps": 1e-3},
}

PARAMETERS: dict[str, int] = {"phi-1.5": 1_418_270_720, "phi-2": 2_779_683_840}
"""As the published checkpoints have them."""


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    config = phi.read_config({k: v for k, v in CONFIG.items() if k not in ("num_key_value_heads",)})
    assert (config.num_kv_heads, len(config.rotary.frequencies), config.activation) == (4, 2, "gelu_new")
    assert (config.epsilon, config.bos_token_id, config.tied_head) == (1e-5, 1, False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"qk_layernorm": True}, UnsupportedModelError, "qk_layernorm is true; minillm runs Phi without"),
        ({"head_dim": 16}, CheckpointError, "head_dim should be hidden_size / num_attention_heads"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        phi.read_config(CONFIG | change)
