"""gpt-oss's configuration: sinks, experts with biases and a clamped gate, a window in every other layer."""

from typing import Any

import numpy as np
import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.canonical import canonical_names
from minillm.models import gpt_oss, tensor_shapes

from . import test_llama

YARN = {"rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 16}

CONFIG: dict[str, Any] = test_llama.CONFIG | {
    "model_type": "gpt_oss",
    "intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "rope_parameters": YARN | {"rope_theta": 150000.0},
    "pad_token_id": 0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "two of four": CONFIG,
    "tied, wide heads": CONFIG
    | {"head_dim": 16, "num_key_value_heads": 4, "tie_word_embeddings": True, "num_experts_per_tok": 3},
    "no biases, no windows": CONFIG | {"attention_bias": False, "layer_types": ["full_attention"] * 2},
}

PARAMETERS = {"gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672}


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    lacking = ("head_dim", "num_local_experts", "rope_parameters", "sliding_window", "max_position_embeddings")
    config = gpt_oss.read_config({name: value for name, value in CONFIG.items() if name not in lacking})
    assert (config.head_dim, config.num_experts, config.windows, config.max_positions) == (64, 128, (128, None), 131072)
    assert (config.rotary.base, config.qkv_bias, config.out_bias, config.epsilon) == (150000.0, True, True, 1e-5)
    np.testing.assert_allclose(config.rotary.scale, 0.1 * np.log(32) + 1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"swiglu_limit": 5.0}, UnsupportedModelError, r"swiglu_limit is 5.0; minillm runs 7.0"),
        ({"swiglu_alpha": 1.0}, UnsupportedModelError, r"swiglu_alpha is 1.0; minillm runs 1.702"),
        ({"sliding_window": None}, CheckpointError, "sliding_window is missing"),
        ({"num_experts_per_tok": 5}, CheckpointError, "num_experts_per_tok 5 should be at most num_local_experts 4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gpt_oss.read_config(CONFIG | change)


class Stacked:
    """A tensor of all experts, in a file's place."""

    dtype = "float32"

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape

    def item(self, expert: int) -> "Stacked":
        return Stacked(self.values[expert])

    def load(self) -> np.ndarray:
        return self.values


def test_outputs_of_gate_and_up_alternate_in_one_tensor_of_all_experts() -> None:
    config = gpt_oss.read_config(CONFIG)
    matrices = np.random.default_rng(0).standard_normal((4, 32, 48), np.float32)
    biases = np.arange(4 * 48, dtype=np.float32).reshape(4, 48)
    place = "model.layers.1.mlp.experts."
    stored: Any = {f"{place}gate_up_proj": Stacked(matrices), f"{place}gate_up_proj_bias": Stacked(biases)}
    apart = canonical_names(stored, config)
    assert apart.keys() < tensor_shapes(config).keys()
    for i, name in enumerate(("gate_proj", "up_proj")):
        np.testing.assert_array_equal(apart[f"layers.1.mlp.experts.3.{name}.weight"].load(), matrices[3, :, i::2].T)
        np.testing.assert_array_equal(apart[f"layers.1.mlp.experts.3.{name}.bias"].load(), biases[3, i::2])


@pytest.mark.parametrize(
    ("shape", "message"),
    [((4, 32), r"\[experts, inputs, outputs\], found \[4, 32\]"), ((4, 32, 47), "outputs of gate_proj and up_proj")],
)
def test_a_tensor_that_holds_no_experts_is_named(shape: tuple[int, ...], message: str) -> None:
    stored: Any = {"layers.1.mlp.experts.gate_up_proj": Stacked(np.zeros(shape, np.float32))}
    with pytest.raises(CheckpointError, match=f"layers.1.mlp.experts.gate_up_proj should have .*{message}"):
        canonical_names(stored, gpt_oss.read_config(CONFIG))
