"""Bamba's configuration: which layers have attention, and partial rotation."""

from typing import Any

import pytest

from minillm.errors import CheckpointError
from minillm.models import bamba

from . import test_llama

CONFIG: dict[str, Any] = test_llama.CONFIG | {
    "model_type": "bamba",
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_expand": 1,
    "rms_norm_eps": 0.05,  # results near zero are normed too: their rounding is not to be seen
}

CONFIGS: dict[str, dict[str, Any]] = {
    "two groups": CONFIG,
    "one group, biases, tied": CONFIG
    | {"mamba_n_groups": 1, "mamba_proj_bias": True, "tie_word_embeddings": True, "mlp_bias": True}
    | {"attention_bias": True, "mamba_conv_bias": False, "attn_layer_indices": [1, 2]},
    "wide heads": CONFIG | {"mamba_expand": 2, "mamba_d_conv": 3, "num_key_value_heads": 4, "rope_theta": 500.0},
}

PARAMETERS = {"bamba-9b": 9_780_235_392}
"""As transformers counts them in the published checkpoints."""


def test_half_of_each_head_is_rotated() -> None:
    config = bamba.read_config(CONFIG)
    assert (len(config.rotary.frequencies), config.mambas) == (2, (True, False, True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_layer_indices": []}, "attn_layer_indices should number some of the 3 layers"),
        ({"mamba_n_heads": 5}, "mamba_n_heads 5 should divide the 32 channels of Mamba"),
        ({"mamba_d_head": 9}, "mamba_n_heads 4 times mamba_d_head 9 should be the 32 channels of Mamba"),
        ({"mamba_n_groups": 3}, "mamba_n_groups 3 should divide mamba_n_heads 4"),
        ({"mamba_d_conv": 1}, "mamba_d_conv should be from 2 to 64, found 1"),
        ({"time_step_limit": [2.0, 1.0]}, "time_step_limit should be the least and the largest step"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sizes_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        bamba.read_config(CONFIG | change)
