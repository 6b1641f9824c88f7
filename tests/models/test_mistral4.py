"""Mistral 4's configuration: latent attention, experts chosen by softmax, a context without a factor of queries."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import mistral4

from .test_deepseek_v2 import EXPERTS, SIZES, YARN

CONFIG: dict[str, Any] = SIZES | EXPERTS | {"model_type": "mistral4", "q_lora_rank": 20}
CONFIG |= {"rope_parameters": YARN | {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}}
CONFIG["max_position_embeddings"] = 256
LONG = CONFIG["rope_parameters"] | {"llama_4_scaling_beta": 0.0, "rope_theta": 500.0, "mscale": 1.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "yarn and groups": CONFIG | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "queries of full rank, halves": CONFIG
    | {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True, "rope_parameters": LONG},
    "not normalised, tied": CONFIG
    | {"norm_topk_prob": False, "first_k_dense_replace": 0, "tie_word_embeddings": True, "v_head_dim": 12},
}

PARAMETERS: dict[str, int] = {}


def test_the_longest_context_is_the_one_in_which_queries_have_no_factor() -> None:
    assert mistral4.read_config(CONFIG).max_positions == 64
    assert mistral4.read_config(CONFIG | {"rope_parameters": LONG}).max_positions == 256
    config = mistral4.read_config(CONFIG | {"rope_parameters": None, "max_position_embeddings": None})
    assert (config.max_positions, config.rotary.base, config.rotary.scale) == (8192, 10_000, 1)


def test_the_share_of_a_whole_key_that_is_rotated_may_be_said() -> None:
    shared = CONFIG | {"rope_parameters": CONFIG["rope_parameters"] | {"partial_rotary_factor": 8 / 20}}
    assert mistral4.read_config(shared) == mistral4.read_config(CONFIG)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"n_group": 4}, CheckpointError, "n_group 4 should divide 6 experts into groups"),
        ({"num_key_value_heads": 2}, CheckpointError, "num_key_value_heads 2 should be num_attention_heads 4"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            UnsupportedModelError,
            "rope_type is 'default'; minillm runs 'yarn'",
        ),
        ({"sliding_window": 5}, UnsupportedModelError, "sliding_window is 5; in this family"),
        (
            {"rope_parameters": LONG | {"partial_rotary_factor": 0.5}},
            UnsupportedModelError,
            "partial_rotary_factor is 0.5; in this family minillm runs 1",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        mistral4.read_config(CONFIG | change)
