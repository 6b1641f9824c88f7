"""Command R's configuration: one norm without bias for attention and MLP, scaled logits."""

from typing import Any

import pytest

from minillm.errors import UnsupportedModelError
from minillm.models import cohere

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "cohere", "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "tied": CONFIG,
    "untied, with biases": CONFIG | {"tie_word_embeddings": False, "attention_bias": True, "logit_scale": 0.5},
    "not grouped": CONFIG | {"num_key_value_heads": 4, "rope_theta": 500.0, "layer_norm_eps": 1e-3},
}

PARAMETERS: dict[str, int] = {"command-r-35b": 34_980_831_232}
"""As the published checkpoints have them."""


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    config = cohere.read_config({k: v for k, v in CONFIG.items() if k not in ("num_key_value_heads",)})
    assert (config.num_kv_heads, config.logit_scale, config.rotary.base) == (4, 0.0625, 500_000.0)
    assert (config.epsilon, config.bos_token_id, config.tied_head) == (1e-5, 5, True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"use_qk_norm": True}, UnsupportedModelError, "use_qk_norm is true; minillm runs Command R without"),
        ({"sliding_window": 5}, UnsupportedModelError, "sliding_window is 5; in this family"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        cohere.read_config(CONFIG | change)
