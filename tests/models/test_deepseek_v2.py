"""DeepSeek-V2's configuration: latent attention, experts chosen by softmax and the best of groups, shared ones."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.measure.accounting import Storage
from minillm.measure.accounting.memory import cache_bytes_per_token, expanded_bytes_per_token
from minillm.models import build_model, building, deepseek_v2, published_config

from ..tiny import Held

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 8,
    "pad_token_id": 0,
}
"""Of latent attention, in the families that have it"""
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "rope_theta": 10_000.0,
}

CONFIG: dict[str, Any] = SIZES | EXPERTS | {"model_type": "deepseek_v2", "q_lora_rank": None}

CONFIGS: dict[str, dict[str, Any]] = {
    "yarn": CONFIG | {"rope_parameters": YARN},
    "queries of low rank, groups": CONFIG
    | {
        "q_lora_rank": 20,
        "n_routed_experts": 8,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
        "attention_bias": True,
    },
    "two shared, tied, biases": CONFIG
    | {"n_shared_experts": 2, "tie_word_embeddings": True, "v_head_dim": 12, "mlp_bias": True},
}

PARAMETERS: dict[str, int] = {"deepseek-v2-lite": 15_706_484_224, "deepseek-v2": 235_741_434_880}


def test_the_cache_keeps_one_latent_and_one_rotated_key_of_a_token() -> None:
    """V2-Lite: 576 numbers in each layer, where 16 heads of 192 and 128 would be 5,120."""
    config = published_config("deepseek-v2-lite")
    assert cache_bytes_per_token(config, Storage()) == 27 * 576 * 4
    assert cache_bytes_per_token(config, Storage(cache="int8")) == 27 * (576 + 4)
    assert expanded_bytes_per_token(config, Storage()) == 27 * 16 * (192 + 128) * 4
    assert expanded_bytes_per_token(published_config("llama-2-7b"), Storage()) == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"norm_topk_prob": True}, UnsupportedModelError, "norm_topk_prob is true; in this family minillm runs false"),
        ({"moe_layer_freq": 2}, UnsupportedModelError, "moe_layer_freq is 2; in this family minillm runs 1"),
        ({"scoring_func": "sigmoid"}, UnsupportedModelError, "scoring_func is 'sigmoid'; minillm runs 'softmax'"),
        ({"topk_method": "noaux_tc"}, UnsupportedModelError, "topk_method is 'noaux_tc'; minillm runs 'greedy', "),
        ({"num_key_value_heads": 2}, CheckpointError, "num_key_value_heads 2 should be num_attention_heads 4"),
        ({"qk_rope_head_dim": 7}, CheckpointError, "rotary position embedding needs an even width"),
        ({"kv_lora_rank": 0}, CheckpointError, "kv_lora_rank should be at least 1, found 0"),
        ({"sliding_window": 5}, UnsupportedModelError, "sliding_window is 5; in this family"),
        ({"num_experts_per_tok": None}, CheckpointError, "num_experts_per_tok is missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        deepseek_v2.read_config(CONFIG | change)


def test_yarn_scales_scores_by_the_square_of_its_factor() -> None:
    """0.1 * 0.707 * ln 40 + 1 of the published models; cosines and sines have no factor of their own."""
    config: Any = published_config("deepseek-v2-lite")
    assert config.rotary.scale == 1
    np.testing.assert_allclose(config.score_scale, 192**-0.5 * (0.0707 * np.log(40) + 1) ** 2, rtol=1e-12)


def test_the_absorbed_projections_are_parts_of_the_checkpoints_one() -> None:
    """kv_b_proj has each head's n rows of keys, then its V rows of values."""
    config: Any = deepseek_v2.read_config(CONFIG)
    C, n, V, H = config.value_dim, config.nope_dim, config.expanded_dim, config.num_heads
    shapes = building.tensor_shapes(deepseek_v2.build, config, as_built=False)
    stored = {
        name: Held(np.random.default_rng(0).normal(size=shape).astype(np.float32)) for name, shape in shapes.items()
    }
    model: Any = build_model(config, stored, NumpyBackend(), as_built=False)
    by_head = stored["layers.0.self_attn.kv_b_proj.weight"].values.reshape(H, n + V, C)
    attention = model.layers[0].attention
    np.testing.assert_array_equal(attention.keys.data.reshape(H, C, n), by_head[:, :n].transpose(0, 2, 1))
    np.testing.assert_array_equal(attention.values.data.reshape(H, V, C), by_head[:, n:])
