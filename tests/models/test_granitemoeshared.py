"""The configuration of Granite 3's mixtures with an MLP that all tokens share."""

from typing import Any

import pytest

from minillm.errors import CheckpointError
from minillm.models import granitemoeshared

from . import test_granitemoe

CONFIG: dict[str, Any] = test_granitemoe.CONFIG | {"model_type": "granitemoeshared", "shared_intermediate_size": 24}

CONFIGS: dict[str, dict[str, Any]] = {
    "shared": CONFIG,
    "without, tied": CONFIG | {"shared_intermediate_size": 0, "tie_word_embeddings": True},
    "with biases": CONFIG | {"attention_bias": True, "residual_multiplier": 1.0, "num_key_value_heads": 4},
}

PARAMETERS: dict[str, int] = {}


def test_an_impossible_width_of_the_shared_mlp_is_named() -> None:
    with pytest.raises(CheckpointError, match="shared_intermediate_size should be 0 or more, found -1"):
        granitemoeshared.read_config(CONFIG | {"shared_intermediate_size": -1})
