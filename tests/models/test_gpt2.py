"""GPT-2's configuration, tensor table and the names of its checkpoints."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.canonical import canonical_names
from minillm.models import build_model, gpt2, tensor_shapes

from ..tiny import Held, logits_of, runner_of, tiny_tensors

CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "gelu by tanh": CONFIG,
    "untied, narrow": CONFIG
    | {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "gelu", "layer_norm_epsilon": 1e-3},
    "scaled by layer": CONFIG
    | {
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "reorder_and_upcast_attn": True,
        "activation_function": "relu",
    },
}

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "distilgpt2": 81_912_576,
}
"""As transformers counts them in the published checkpoints."""


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"n_embd": None}, CheckpointError, "n_embd is missing"),
        ({"n_embd": 33}, CheckpointError, "n_embd 33 should be a multiple of n_head 4"),
        ({"n_inner": 0}, CheckpointError, "n_inner should be at least 1, found 0"),
        ({"scale_attn_weights": 1}, CheckpointError, "scale_attn_weights should be true or false, found 1"),
        ({"add_cross_attention": True}, UnsupportedModelError, "add_cross_attention is true; minillm runs decoders"),
        ({"activation_function": "mish"}, UnsupportedModelError, "activation_function is 'mish'; minillm runs 'relu'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gpt2.read_config(CONFIG | change)


def test_the_end_of_text_is_gpt2s_where_nothing_else_is_said() -> None:
    assert gpt2.read_config(CONFIG).eos_token_ids == (50256,)
    assert gpt2.read_config(CONFIG | {"eos_token_id": None}).eos_token_ids == ()
    assert gpt2.read_config(CONFIG | {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)


def test_scores_are_scaled_as_config_json_says() -> None:
    by_layer = {"scale_attn_by_inverse_layer_idx": True}
    assert gpt2.read_config(CONFIG).scales == (8**-0.5, 8**-0.5)
    assert gpt2.read_config(CONFIG | by_layer).scales == (8**-0.5, 8**-0.5 / 2)
    assert gpt2.read_config(CONFIG | by_layer | {"scale_attn_weights": False}).scales == (1, 0.5)


def stored_as_published() -> dict[str, Any]:
    """The tensors of `CONFIG` as a checkpoint has them: projections are [in, out]."""
    canonical = {name: tensor.load() for name, tensor in tiny_tensors(CONFIG).items()}
    return {name: Held(array.T if ".c_" in name else array) for name, array in canonical.items()}


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_names_and_leftovers_of_published_checkpoints(prefix: str) -> None:
    """With and without a prefix, a causal mask and its number in each layer, and a copy of the tied head."""
    config = gpt2.read_config(CONFIG)
    stored = {prefix + name: tensor for name, tensor in stored_as_published().items()}
    for i in range(config.num_layers):
        stored[f"{prefix}h.{i}.attn.bias"] = Held(np.tril(np.ones((1, 1, 64, 64), bool)))
        stored[f"{prefix}h.{i}.attn.masked_bias"] = Held(np.float32(-1e4))
    stored["lm_head.weight"] = stored[f"{prefix}wte.weight"]
    tensors = canonical_names(stored, config)
    assert set(tensors) == set(tensor_shapes(config))
    line = list(range(3, 30))
    ours, plain = (
        logits_of(runner_of(build_model(config, weights, NumpyBackend(), as_built=as_built)), line)
        for weights, as_built in ((tensors, False), (tiny_tensors(CONFIG), True))
    )
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


def test_a_projection_of_another_shape_is_named() -> None:
    config = gpt2.read_config(CONFIG)
    stored = stored_as_published() | {"h.1.mlp.c_fc.weight": Held(np.zeros((32, 120), np.float32))}
    with pytest.raises(CheckpointError, match=r"h\.1\.mlp\.c_fc\.weight should have shape \[32, 128\].*\[32, 120\]"):
        build_model(config, canonical_names(stored, config), NumpyBackend(), as_built=False)
