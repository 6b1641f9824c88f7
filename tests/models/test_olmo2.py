"""OLMo 2's configuration: norms after attention and MLP, and of all queries and keys together."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import olmo2

from . import test_llama

CONFIG = test_llama.CONFIG | {"model_type": "olmo2"}

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": CONFIG,
    "with biases": CONFIG | {"num_key_value_heads": 4, "attention_bias": True},
    "wide heads": CONFIG | {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "rope_theta": 500.0},
}

PARAMETERS = {
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
}
"""As the published checkpoints have them."""


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    config = olmo2.read_config(
        {k: v for k, v in CONFIG.items() if k not in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings")}
    )
    assert (config.num_kv_heads, config.epsilon, config.max_positions) == (4, 1e-5, 2048)
    assert (config.bos_token_id, config.eos_token_ids, config.tied_head) == (None, (50279,), False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_key_value_heads": 3}, CheckpointError, "4 should be a multiple of num_key_value_heads 3"),
        ({"hidden_act": "mish"}, UnsupportedModelError, "hidden_act is 'mish'; minillm runs 'relu', 'gelu'"),
        ({"sliding_window": 5}, UnsupportedModelError, "sliding_window is 5; in this family minillm runs attention to"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor is 0.5; in this family"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        olmo2.read_config(CONFIG | change)
