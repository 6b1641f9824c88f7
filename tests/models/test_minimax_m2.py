"""MiniMax-M2's configuration: experts chosen by sigmoids, norms of all queries, partial rotation."""

from typing import Any

import pytest

from minillm.errors import CheckpointError
from minillm.models import minimax_m2

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {
    "model_type": "minimax_m2",
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 8,
    "pad_token_id": 0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "three of six": CONFIG,
    "half of each head": CONFIG | {"rotary_dim": 4, "tie_word_embeddings": True, "num_experts_per_tok": 2},
    "wide heads": CONFIG | {"head_dim": 16, "num_key_value_heads": 4, "rope_theta": 500.0},
}

PARAMETERS: dict[str, int] = {}


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    config = minimax_m2.read_config({k: v for k, v in CONFIG.items() if k not in ("head_dim", "num_local_experts")})
    assert (config.head_dim, config.num_experts, config.rotary.base) == (128, 256, 5e6)
    assert config.router.sigmoid and config.corrected and config.normalised
    assert len(minimax_m2.read_config(CONFIG | {"rotary_dim": 4}).rotary.frequencies) == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_experts_per_tok": 7}, CheckpointError, "num_experts_per_tok 7 should be at most num_local_experts 6"),
        ({"rotary_dim": 16}, CheckpointError, "rotary_dim should be at most 8, found 16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        minimax_m2.read_config(CONFIG | change)
