"""StableLM's configuration: layer norms, a quarter of each head rotated, attention and MLP side by side."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import stablelm

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "stablelm", "num_key_value_heads": 4, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "one after the other": CONFIG,
    "side by side, biases, tied": CONFIG
    | {"use_parallel_residual": True, "use_qkv_bias": True, "tie_word_embeddings": True},
    "grouped": CONFIG | {"num_key_value_heads": 2, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-3},
}

PARAMETERS: dict[str, int] = {"stablelm-3b": 2_795_443_200, "stablelm-2-1.6b": 1_644_515_328}
"""As the published checkpoints have them."""


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    config = stablelm.read_config(CONFIG | {"max_position_embeddings": None})
    assert (config.max_positions, len(config.rotary.frequencies), config.epsilon) == (4096, 1, 1e-5)
    assert (config.qkv_bias, config.parallel, config.eos_token_ids) == (False, False, (0,))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"qk_layernorm": True}, UnsupportedModelError, "qk_layernorm is true; minillm runs StableLM without"),
        ({"partial_rotary_factor": 0.1}, CheckpointError, "needs an even width of at least 2, found 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        stablelm.read_config(CONFIG | change)
