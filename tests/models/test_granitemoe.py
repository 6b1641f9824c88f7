"""The configuration of Granite 3's mixtures, and the tensors in which checkpoints have all experts of a layer."""

from typing import Any

import numpy as np
import pytest

from minillm.errors import CheckpointError
from minillm.models import granitemoe

from ..tiny import Held
from . import test_granite

CONFIG: dict[str, Any] = test_granite.CONFIG | {
    "model_type": "granitemoe",
    "intermediate_size": 20,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "two of four": CONFIG,
    "two of three, tied": CONFIG | {"num_local_experts": 3, "tie_word_embeddings": True},
    "with biases": CONFIG | {"attention_bias": True, "residual_multiplier": 1.0, "num_key_value_heads": 4},
}

PARAMETERS = {"granite-3.0-1b-a400m": 1_334_628_352, "granite-3.0-3b-a800m": 3_298_793_472}
"""As transformers counts them in the published checkpoints."""


def test_a_tensor_of_all_experts_is_read_as_one_of_each() -> None:
    stacked = np.arange(3 * 4 * 5, dtype=np.float32).reshape(3, 4, 5)
    stem = "model.layers.0.block_sparse_moe."
    tensors = granitemoe.NAMES.canonical({f"{stem}input_linear.weight": Held(stacked)}, tied_head=False)
    assert sorted(tensors) == sorted(
        f"{stem[6:]}experts.{expert}.{name}_proj.weight" for expert in range(3) for name in ("gate", "up")
    )
    for expert in range(3):
        for name, rows in (("gate", slice(2)), ("up", slice(2, 4))):
            matrix = tensors[f"{stem[6:]}experts.{expert}.{name}_proj.weight"].load()
            np.testing.assert_array_equal(matrix, stacked[expert, rows])


def test_more_experts_for_a_token_than_there_are_are_named() -> None:
    with pytest.raises(CheckpointError, match="num_experts_per_tok 5 should be at most num_local_experts 4"):
        granitemoe.read_config(CONFIG | {"num_experts_per_tok": 5})
