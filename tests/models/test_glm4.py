"""GLM-4-0414's configuration: norms after attention and MLP too."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import glm4, tensor_shapes

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {"model_type": "glm4", "head_dim": 8, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "half of each head": CONFIG,
    "with biases off, tied": CONFIG
    | {"attention_bias": False, "tie_word_embeddings": True, "partial_rotary_factor": 0.75, "head_dim": 16},
    "not grouped": CONFIG | {"num_key_value_heads": 4, "rope_theta": 500.0},
}

PARAMETERS: dict[str, int] = {"glm-4-9b-0414": 9_400_279_040}
"""As the published checkpoints have them."""


def test_a_layer_has_four_norms() -> None:
    config = glm4.read_config(CONFIG)
    names = {name for name in tensor_shapes(config) if name.startswith("layers.1.post")}
    ends = ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    assert names == {f"layers.1.{end}.weight" for end in ends}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"partial_rotary_factor": 1.5}, CheckpointError, "partial_rotary_factor should be at most 1"),
        ({"sliding_window": 5}, UnsupportedModelError, "sliding_window is 5; in this family"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        glm4.read_config(CONFIG | change)
