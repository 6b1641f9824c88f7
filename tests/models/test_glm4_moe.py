"""GLM-4.5's configuration: experts chosen by sigmoids and groups, shared ones, dense layers first."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.canonical import canonical_names
from minillm.models import glm4_moe, tensor_shapes

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {
    "model_type": "glm4_moe",
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 8,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "a dense layer first": CONFIG,
    "groups, scaled": CONFIG
    | {
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "not normalised, two shared": CONFIG
    | {"norm_topk_prob": False, "n_shared_experts": 2, "first_k_dense_replace": 0, "tie_word_embeddings": True},
}

PARAMETERS: dict[str, int] = {}


def test_the_layer_that_predicts_further_tokens_is_left_out() -> None:
    config = glm4_moe.read_config(CONFIG | {"num_nextn_predict_layers": 1})
    stored: Any = dict.fromkeys(("model.layers.1.input_layernorm.weight", "model.layers.2.eh_proj.weight"))
    assert list(canonical_names(stored, config)) == ["layers.1.input_layernorm.weight"]
    assert config.sparse == (False, True) and config.mixed_layers
    assert tensor_shapes(config)["layers.1.mlp.gate.e_score_correction_bias"] == (6,)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"n_group": 4}, CheckpointError, "n_group 4 should divide 6 experts into groups"),
        ({"n_group": 3, "topk_group": 4}, CheckpointError, "topk_group should be at most n_group 3"),
        (
            {"first_k_dense_replace": 2},
            CheckpointError,
            "first_k_dense_replace should be from 0 to num_hidden_layers 2 - 1, found 2",
        ),
        ({"sliding_window": 5}, UnsupportedModelError, "sliding_window is 5; in this family"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        glm4_moe.read_config(CONFIG | change)
