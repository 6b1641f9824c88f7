"""Granite's configuration: four factors, of which that of the residual sums is folded into others."""

from typing import Any

import pytest

from minillm.errors import CheckpointError
from minillm.models import granite

from . import test_llama

CONFIG = test_llama.CONFIG | {
    "model_type": "granite",
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "factors": CONFIG,
    "scores alone, with biases": test_llama.CONFIG
    | {"model_type": "granite", "attention_multiplier": 0.3, "attention_bias": True, "mlp_bias": True}
    | {"tie_word_embeddings": True},
    "large epsilon": CONFIG | {"rms_norm_eps": 0.1, "residual_multiplier": 1.7, "num_key_value_heads": 4},
}

PARAMETERS = {"granite-3.0-2b": 2_533_531_648, "granite-3.0-8b": 8_170_848_256}
"""As the published checkpoints have them."""


def test_factors_that_config_json_leaves_out_are_one() -> None:
    config = granite.read_config(test_llama.CONFIG)
    assert (config.embedding_scale, config.score_scale, config.logit_scale) == (1, 1, 1)


@pytest.mark.parametrize("name", ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_sc"])
@pytest.mark.parametrize("value", [0, -1.0, 1e9, "2"])
def test_an_impossible_factor_is_named(name: str, value: Any) -> None:
    name = next(field for field in CONFIG if field.startswith(name))
    with pytest.raises(CheckpointError, match=f"{name} should be (above 1e-06|at most 1e\\+06|a finite number), found"):
        granite.read_config(CONFIG | {name: value})
