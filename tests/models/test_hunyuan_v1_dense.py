"""Hunyuan's configuration: norms of heads after rotation; a rotary base stretched by alpha."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import hunyuan_v1_dense

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "hunyuan_v1_dense", "head_dim": 8, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": CONFIG,
    "alpha, tied": CONFIG
    | {
        "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 100.0, "factor": 1.0},
        "tie_word_embeddings": True,
    },
    "with biases, wide heads": CONFIG | {"attention_bias": True, "head_dim": 16, "num_key_value_heads": 4},
}

PARAMETERS: dict[str, int] = {}


def test_alpha_stretches_the_base_whatever_the_length() -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32}
    config = hunyuan_v1_dense.read_config(CONFIG | {"rope_scaling": scaling, "rope_theta": 10_000.0})
    assert not config.keys_follow_length and config.max_positions == 64
    assert config.rotary.base == pytest.approx(10_000 * 1000 ** (8 / 6))
    plain = hunyuan_v1_dense.read_config(CONFIG | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert plain.keys_follow_length


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_key_value_heads": 3}, CheckpointError, "4 should be a multiple of num_key_value_heads 3"),
        ({"sliding_window": 5}, UnsupportedModelError, "sliding_window is 5; in this family"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        hunyuan_v1_dense.read_config(CONFIG | change)
