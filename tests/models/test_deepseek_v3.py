"""DeepSeek-V3's configuration: V2's latent attention, experts chosen by sigmoids and groups."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import deepseek_v3

from .test_deepseek_v2 import EXPERTS, SIZES, YARN

CONFIG: dict[str, Any] = SIZES | EXPERTS
CONFIG |= {"model_type": "deepseek_v3", "q_lora_rank": 20, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
CONFIG["routed_scaling_factor"] = 1.0

CONFIGS: dict[str, dict[str, Any]] = {
    "groups": CONFIG
    | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "rope_parameters": YARN}
    | {"routed_scaling_factor": 2.5},
    "queries of full rank, halves": CONFIG | {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
    "not normalised, tied": CONFIG
    | {
        "norm_topk_prob": False,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
        "tie_word_embeddings": True,
    },
}

PARAMETERS: dict[str, int] = {"deepseek-v3": 671_026_419_200}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func is 'softmax'; minillm runs 'sigmoid'"),
        ({"topk_method": "greedy"}, UnsupportedModelError, "topk_method is 'greedy'; minillm runs 'noaux_tc'"),
        ({"n_group": 4}, CheckpointError, "n_group 4 should divide 6 experts into groups"),
        (
            {"first_k_dense_replace": 2},
            CheckpointError,
            "first_k_dense_replace should be from 0 to num_hidden_layers 2",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        deepseek_v3.read_config(CONFIG | change)
