"""LFM2's configuration: convolutions between attention, the width of its MLP, and what is refused."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import lfm2

CONFIG: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 60,
    "block_multiple_of": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "layer_types": ["conv", "full_attention", "conv"],
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": CONFIG,
    "wide convolutions with biases, tied": CONFIG
    | {
        "conv_L_cache": 5,
        "conv_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "layer_types": ["full_attention", "full_attention", "conv"],
    },
    "as it is": CONFIG
    | {"block_auto_adjust_ff_dim": False, "conv_L_cache": 2, "num_key_value_heads": 1, "rope_theta": 500.0},
}

PARAMETERS = {"lfm2-350m": 354_483_968, "lfm2-700m": 742_489_344, "lfm2-1.2b": 1_170_340_608}
"""As transformers counts them in the published checkpoints."""


def test_the_width_of_the_mlp_is_two_thirds_times_a_factor_rounded_up() -> None:
    assert lfm2.read_config(CONFIG).intermediate_size == 40
    assert lfm2.read_config(CONFIG | {"block_ffn_dim_multiplier": 1.3}).intermediate_size == 56
    assert lfm2.read_config(CONFIG | {"block_auto_adjust_ff_dim": False}).intermediate_size == 60


def test_published_names_of_fields_are_read() -> None:
    raw = {name: value for name, value in CONFIG.items() if name not in ("layer_types", "intermediate_size")}
    config = lfm2.read_config(raw | {"full_attn_idxs": [1], "block_ff_dim": 60, "tie_embedding": True})
    assert (config.convolves, config.intermediate_size, config.tied_head) == ((True, False, True), 40, True)
    assert config.layer_states == (((2, 32),), (), ((2, 32),))


def test_what_is_not_supported_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="layer_types has 'sliding_attention'"):
        lfm2.read_config(CONFIG | {"layer_types": ["conv", "sliding_attention", "conv"]})
    with pytest.raises(CheckpointError, match="conv_L_cache should be at least 2, found 1"):
        lfm2.read_config(CONFIG | {"conv_L_cache": 1})
    with pytest.raises(CheckpointError, match="full_attention in one layer at least"):
        lfm2.read_config(CONFIG | {"layer_types": ["conv"] * 3})
    with pytest.raises(CheckpointError, match="layer_types should have num_hidden_layers 3 entries"):
        lfm2.read_config(CONFIG | {"layer_types": ["conv"]})
