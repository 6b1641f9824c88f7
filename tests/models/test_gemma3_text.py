"""Gemma 3's configuration: two rotary bases, windows, and the text part of a model of text and images."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.gguf.architectures import ARCHITECTURES
from minillm.formats.gguf.file import read_gguf
from minillm.formats.gguf.read_metadata import read_gguf_model
from minillm.models import build_model, gemma3_text

from ..tiny import logits_of, model_of, runner_of, tiny_tensors
from . import test_gemma2

CONFIG: dict[str, Any] = {
    name: value for name, value in test_gemma2.CONFIG.items() if not name.endswith("softcapping")
} | {"model_type": "gemma3_text", "sliding_window_pattern": 2}

LINEAR = {"rope_type": "linear", "factor": 4.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "two bases": CONFIG | {"rope_theta": 5000.0, "rope_local_base_freq": 100.0, "rope_scaling": LINEAR},
    "tables, untied": CONFIG
    | {
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": LINEAR | {"rope_theta": 700.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "with biases, capped": CONFIG | {"attention_bias": True, "final_logit_softcapping": 0.5, "head_dim": 16},
}

PARAMETERS = {
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472 - 416_866_032 - 2_950_272,
    "gemma-3-12b": 12_187_325_040 - 416_866_032 - 4_425_984 + 1152,
    "gemma-3-27b": 27_432_406_640 - 416_866_032 - 6_195_456 + 1152,
}
"""As the published checkpoints have them, from 4b on less the vision tower (SigLIP) and its projector."""


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    raw = {k: v for k, v in CONFIG.items() if not k.endswith(("_window", "_pattern", "_embeddings", "scalar"))}
    config = gemma3_text.read_config(raw | {"num_hidden_layers": 7})
    assert config.windows == (4096,) * 5 + (None, 4096)
    assert (config.max_positions, config.query_scalar, config.logit_cap) == (131_072, 256, None)
    bases = [rotary.frequencies[1] ** -6 for rotary in config.rotaries]  # pair 1 of 6
    np.testing.assert_allclose(bases, [10_000] * 5 + [1_000_000, 10_000], rtol=1e-4)


def test_earlier_fields_and_tables_say_the_same() -> None:
    older = gemma3_text.read_config(CONFIGS["two bases"])
    tables = {
        "full_attention": LINEAR | {"rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    assert gemma3_text.read_config(CONFIG | {"rope_parameters": tables}) == older


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sliding_window": None}, CheckpointError, "sliding_window is missing"),
        ({"sliding_window_pattern": 0}, CheckpointError, "sliding_window_pattern should be at least 1, found 0"),
        ({"rope_local_base_freq": 1}, CheckpointError, "rope_local_base_freq should be above 1, found 1"),
        ({"attn_logit_softcapping": 50.0}, UnsupportedModelError, "Gemma 3 has no cap of attention scores: expected n"),
        ({"rope_parameters": {"rope_theta": 5.0}}, UnsupportedModelError, "rope_parameters has 'rope_theta'; expected"),
        ({"rope_parameters": {"full_attention": 5}}, CheckpointError, "full_attention should be a table, found 5"),
        ({"rope_scaling": {"rope_type": "su"}}, UnsupportedModelError, "rope_type is 'su'; minillm runs 'default'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gemma3_text.read_config(CONFIG | change)


def test_a_gguf_file_has_the_same_logits(tmp_path: Path) -> None:
    """Its norms have the whole gain, and its windows and the base of their layers are llama.cpp's own."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    raw = {k: v for k, v in CONFIG.items() if k != "sliding_window_pattern"} | {"num_hidden_layers": 6}
    raw |= {"query_pre_attn_scalar": raw["head_dim"]}
    backend, names = NumpyBackend(), {ours: theirs for theirs, ours in ARCHITECTURES["gemma3"].tensors.items()}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    for key, name in ARCHITECTURES["gemma3"].keys.items():
        if name in raw:
            writer.add_uint32(f"gemma3.{key}", raw[name])
    writer.add_float32("gemma3.rope.freq_base", 1e6)
    for name, tensor in tiny_tensors(raw).items():
        stem, _, kind = name.rpartition(".")
        number = re.search(r"(?<=layers\.)\d+", stem)
        stored = names[re.sub(r"(?<=layers\.)\d+", "N", stem)]
        writer.add_tensor(f"{stored.replace('N', number[0]) if number else stored}.{kind}", tensor.load())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, tensors, _ = read_gguf_model(read_gguf(tmp_path / "m.gguf"))
    model = build_model(gemma3_text.read_config(found), tensors, backend)
    line = np.random.default_rng(2).integers(3, 96, 30).tolist()
    ours, plain = (logits_of(runner_of(each), line) for each in (model, model_of(raw)))
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)
