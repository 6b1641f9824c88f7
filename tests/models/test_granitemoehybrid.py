"""Granite 4's configuration: kinds of layers, positions, experts beside the MLP, and what is refused."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import granitemoehybrid

from . import test_granitemoe

CONFIG: dict[str, Any] = test_granitemoe.CONFIG | {
    "model_type": "granitemoehybrid",
    "shared_intermediate_size": 24,
    "num_local_experts": 0,
    "layer_types": ["attention", "attention"],
    "position_embedding_type": "rope",
    "mamba_n_heads": 4,
}

HYBRID: dict[str, Any] = {name: value for name, value in CONFIG.items() if name != "num_experts_per_tok"} | {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
    "mamba_d_state": 12,
    "mamba_expand": 1,
    "rms_norm_eps": 0.01,  # results near zero are normed too: their rounding is not to be seen
}

CONFIGS: dict[str, dict[str, Any]] = {
    "two groups": HYBRID | {"mamba_n_groups": 2},
    "one group, experts, rotation": HYBRID
    | {"position_embedding_type": "rope", "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"mamba_n_heads": 8, "mamba_expand": 2, "mamba_conv_bias": False, "mamba_d_conv": 3},
    "attention alone": {name: value for name, value in CONFIG.items() if name != "num_experts_per_tok"},
}

PARAMETERS = {
    "granite-4.0-micro": 3_402_836_480,
    "granite-4.0-h-micro": 3_191_396_096,
    "granite-4.0-h-tiny": 6_939_037_248,
    "granite-4.0-h-small": 32_207_337_984,
}
"""As transformers counts them in the published checkpoints."""


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    config = granitemoehybrid.read_config({k: v for k, v in CONFIG.items() if k != "position_embedding_type"})
    assert config.rotated == (False, False)
    assert (config.num_experts, config.intermediate_size, config.shared_size) == (0, 24, 24)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"position_embedding_type": "alibi"}, UnsupportedModelError, "position_embedding_type is 'alibi'"),
        ({"layer_types": ["attention"]}, CheckpointError, "layer_types should have num_hidden_layers 2 entries"),
        ({"layer_types": ["attention", "conv"]}, UnsupportedModelError, "layer_types has 'conv'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        granitemoehybrid.read_config(CONFIG | change)
