"""dots.llm1's configuration: experts chosen by sigmoids, windows in the upper layers."""

from typing import Any

import pytest

from minillm.errors import CheckpointError
from minillm.models import dots1

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {
    "model_type": "dots1",
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "pad_token_id": 0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "not normalised": CONFIG,
    "a dense layer first, window": CONFIG
    | {
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "with biases, two shared": CONFIG
    | {"attention_bias": True, "n_shared_experts": 2, "sliding_window": None, "tie_word_embeddings": True},
}

PARAMETERS: dict[str, int] = {}


def test_upper_layers_have_a_window() -> None:
    config = dots1.read_config(CONFIG | {"num_hidden_layers": 4, "sliding_window": 7, "max_window_layers": 2})
    assert config.windows == (None, None, 7, 7)
    assert dots1.read_config(CONFIG).windows == (None, None)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"n_routed_experts": None}, CheckpointError, "n_routed_experts should be at least 1, found 0"),
        ({"num_experts_per_tok": 7}, CheckpointError, "num_experts_per_tok 7 should be at most n_routed_experts 6"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        dots1.read_config(CONFIG | change)
