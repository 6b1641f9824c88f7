"""OLMoE's configuration: the weights of experts, and norms that span all heads."""

from typing import Any

import pytest

from minillm.errors import UnsupportedModelError
from minillm.models import olmoe, tensor_shapes

from . import test_llama

CONFIG = test_llama.CONFIG | {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3}

CONFIGS: dict[str, dict[str, Any]] = {
    "three of six": CONFIG,
    "normalised, with biases": CONFIG | {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 4},
    "one of five, tied": CONFIG | {"num_experts": 5, "num_experts_per_tok": 1, "tie_word_embeddings": True},
}

PARAMETERS = {"olmoe-1b-7b": 6_919_161_856}
"""As the published checkpoint has them."""


def test_a_norm_spans_all_heads_and_weights_are_probabilities() -> None:
    config = olmoe.read_config(CONFIG)
    assert (config.normalised, config.eos_token_ids, config.epsilon) == (False, (50279,), 1e-5)
    shapes = tensor_shapes(config)
    assert shapes["layers.0.self_attn.q_norm.weight"] == (32,)
    assert shapes["layers.0.self_attn.k_norm.weight"] == (16,)


def test_clipped_projections_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"clip_qkv is 8\.0; minillm clips no queries"):
        olmoe.read_config(CONFIG | {"clip_qkv": 8.0})
