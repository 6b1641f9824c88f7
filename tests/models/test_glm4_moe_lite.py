"""GLM-4.7-Flash's configuration: DeepSeek-V3 with layers of either kind by name."""

from typing import Any

import pytest

from minillm.errors import CheckpointError
from minillm.models import glm4_moe_lite

from .test_deepseek_v3 import CONFIG as V3

CONFIG: dict[str, Any] = V3 | {"model_type": "glm4_moe_lite"}
del CONFIG["first_k_dense_replace"]

CONFIGS: dict[str, dict[str, Any]] = {
    "a dense layer first": CONFIG,
    "a dense layer last": CONFIG | {"mlp_layer_types": ["sparse", "dense"], "v_head_dim": 24, "attention_bias": True},
    "halves, tied": CONFIG | {"rope_interleave": False, "tie_word_embeddings": True, "norm_topk_prob": False},
}

PARAMETERS: dict[str, int] = {"glm-4.7-flash": 29_943_393_920}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_layer_types": ["dense", "dense"]}, "mlp_layer_types should be 'dense' or 'sparse' for each of 2 layers"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types should be 'dense' or 'sparse' for each of 2 layers"),
        ({"first_k_dense_replace": 0}, "first_k_dense_replace 0 and mlp_layer_types differ: leave one out"),
    ],
    ids=["no experts", "too few", "two fields"],
)
def test_kinds_of_layers_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        glm4_moe_lite.read_config(CONFIG | change)
