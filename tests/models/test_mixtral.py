"""Mixtral's configuration, and its experts."""

from typing import Any

import pytest

from minillm.errors import CheckpointError
from minillm.models import mixtral

from . import test_llama

CONFIG = test_llama.CONFIG | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "two of four": CONFIG,
    "two of six, window": CONFIG | {"num_local_experts": 6, "sliding_window": 9},
    "all of five, tied": CONFIG | {"num_local_experts": 5, "num_experts_per_tok": 5, "tie_word_embeddings": True},
}

PARAMETERS = {"mixtral-8x7b": 46_702_792_704}
"""As the published checkpoint has them."""


def test_the_numbers_of_experts_are_read_by_either_name() -> None:
    config = mixtral.read_config(CONFIG)
    assert (config.num_experts, config.experts_per_token, config.windows) == (4, 2, (None, None))
    other = {name: value for name, value in CONFIG.items() if name != "num_local_experts"}
    assert mixtral.read_config(other | {"num_experts": 4}) == config
    assert mixtral.read_config(other).num_experts == 8  # transformers' own default
    with pytest.raises(CheckpointError, match="num_experts_per_tok 5 should be at most num_local_experts 4"):
        mixtral.read_config(CONFIG | {"num_experts_per_tok": 5})
    with pytest.raises(CheckpointError, match="num_local_experts is 4 and num_experts, its other name, 8: leave one"):
        mixtral.read_config(CONFIG | {"num_experts": 8})
