"""Gemma 2's configuration: soft caps, windows in every other layer, gains stored less 1."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minillm.backends.formats import BFLOAT16, FLOAT32
from minillm.backends.numpy import NumpyBackend
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.load_model import load_model
from minillm.formats.write_checkpoint import write_checkpoint
from minillm.models import family_of, gemma2, tensor_shapes

from ..tiny import logits_of, model_of, runner_of

CONFIG: dict[str, Any] = {
    "model_type": "gemma2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "sliding_window": 9,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 0.5,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "caps": CONFIG,
    "no caps, untied": CONFIG
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    "with biases": CONFIG
    | {
        "attention_bias": True,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_theta": 500.0,
    },
}

PARAMETERS = {"gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320}
"""As the published checkpoints have them."""

LINE = np.random.default_rng(2).integers(3, 96, 20).tolist()


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    left_out = ("key_value_heads", "head_dim", "_window", "scalar", "capping")
    config = gemma2.read_config({k: v for k, v in CONFIG.items() if not k.endswith(left_out)})
    assert (config.num_kv_heads, config.head_dim, config.query_scalar) == (4, 256, 256)
    assert (config.score_cap, config.logit_cap, config.windows) == (50, 30, (4096, None))
    assert (config.bos_token_id, config.eos_token_ids, config.tied_head) == (2, (1,), True)
    assert (config.activation, config.epsilon) == ("gelu_new", 1e-6)


def test_the_scale_of_the_embedding_is_rounded_as_activations_are() -> None:
    assert gemma2.embedding_scale(640, FLOAT32) == np.float32(640**0.5)
    assert gemma2.embedding_scale(640, BFLOAT16) == float(ml_dtypes.bfloat16(640**0.5)) == 25.25


@pytest.mark.parametrize("name", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_cap_of_millions_is_no_cap(name: str) -> None:
    """c tanh(x / c) is x where c is large; a small one is seen."""
    plain, wide = (logits_of(runner_of(model_of(CONFIG | {name: cap})), LINE) for cap in (None, 3e4))
    np.testing.assert_allclose(wide, plain, rtol=1e-4, atol=1e-4)
    capped = logits_of(runner_of(model_of(CONFIG)), LINE)
    assert np.abs(capped - plain).max() > 0.01
    assert np.abs(capped).max() < 0.5


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_written_checkpoint_keeps_the_gains(stored: str, dtype: str, tmp_path: Path) -> None:
    """As stored in 16 bits; in 8 bits, which only minillm reads, as the model uses them."""
    source = tmp_path / "in"
    source.mkdir()
    raw, rng = dict(CONFIG), np.random.default_rng(1)
    numpy_type = np.float32 if stored == "float32" else ml_dtypes.bfloat16
    shapes = tensor_shapes(family_of(raw).read_config(raw))
    arrays = {name: (0.3 * rng.standard_normal(shape)).astype(numpy_type) for name, shape in shapes.items()}
    save_file({f"model.{name}": array for name, array in arrays.items()}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    write_checkpoint(source, tmp_path / "out", dtype)
    norm = load_file(tmp_path / "out" / "model.safetensors")
    gain = arrays["norm.weight"].astype(np.float32)
    found = norm["norm.weight"] if dtype == "int8" else norm["model.norm.weight"]
    np.testing.assert_array_equal(found.astype(np.float32), gain + 1 if dtype == "int8" else gain)
    expected = logits_of(runner_of(load_model(source, NumpyBackend(weights=dtype))), LINE)
    np.testing.assert_array_equal(
        logits_of(runner_of(load_model(tmp_path / "out", NumpyBackend(weights="auto"))), LINE), expected
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_key_value_heads": 3}, CheckpointError, "4 should be a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, CheckpointError, "needs an even width of at least 2, found 7"),
        ({"intermediate_size": None}, CheckpointError, "intermediate_size is missing"),
        ({"sliding_window": None}, CheckpointError, "sliding_window is missing"),
        ({"query_pre_attn_scalar": 0}, CheckpointError, "query_pre_attn_scalar should be above 0, found 0"),
        ({"final_logit_softcapping": -1.0}, CheckpointError, "final_logit_softcapping should be above 0, found -1.0"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "layer_types should have num_hidden_layers 2 entries"),
        ({"hidden_activation": "mish"}, UnsupportedModelError, "hidden_activation is 'mish'; minillm runs 'relu'"),
        ({"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional_attention is true; minillm"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor is 0.5; in this family"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gemma2.read_config(CONFIG | change)
