"""Gemma 4's configuration: layers that differ, per-layer embeddings, experts beside MLPs, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.numpy import NumpyBackend
from minillm.batch import TokenSequence
from minillm.errors import CheckpointError, ParameterError, UnsupportedModelError
from minillm.formats.canonical import canonical_names
from minillm.formats.load_model import load_model
from minillm.models import build_model, config_of, gemma4_text
from minillm.parallel import Parallel

from ..tiny import Held, logits_of, runner_of, tiny_tensors

CONFIG: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
}
WITHOUT: dict[str, Any] = {"hidden_size_per_layer_input": 0, "num_hidden_layers": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "per-layer embeddings": CONFIG
    | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 0.5},
    "keys are values": CONFIG
    | WITHOUT
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "experts": CONFIG
    | WITHOUT
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
}

PARAMETERS = {
    "gemma-4-e2b": 4_628_569_379,
    "gemma-4-e4b": 7_463_013_418,
    "gemma-4-31b": 30_697_345_340,
    "gemma-4-26b-a4b": 25_233_141_790,
}
"""As transformers counts them, with the scalars of layers; without the towers of images and sound."""


def test_the_last_layers_read_the_last_of_their_kind_and_may_have_wider_mlps() -> None:
    config = gemma4_text.read_config(CONFIGS["per-layer embeddings"])
    assert config.kv_sources == (0, 1, 0, 1)
    assert config.mlp_sizes == (24, 24, 48, 48)
    assert config.kv_shapes == ((2, 8), (2, 16)) * 2
    assert (config.per_layer_width, config.per_layer_size) == (32, 8)


def test_only_the_first_quarter_of_all_pairs_turns_without_a_window() -> None:
    config = gemma4_text.read_config(CONFIG)
    local, full = config.rotaries[:2]
    np.testing.assert_allclose(local.frequencies, 10_000.0 ** -(np.arange(4) / 4), rtol=1e-6)
    np.testing.assert_allclose(full.frequencies, [1, 1e6 ** (-1 / 8), *[0] * 6], rtol=1e-6)
    slower = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "factor": 8.0}
    scaled = gemma4_text.read_config(CONFIG | {"rope_parameters": gemma4_text.ROTARY | {"full_attention": slower}})
    np.testing.assert_allclose(np.multiply(scaled.rotaries[1].frequencies, 8), full.frequencies, rtol=1e-6)


def test_what_config_json_leaves_out_is_transformers_own() -> None:
    left_out = {"head_dim", "global_head_dim", "sliding_window", "layer_types", "max_position_embeddings"}
    raw = {name: value for name, value in CONFIG.items() if name not in left_out}
    config = gemma4_text.read_config(raw | {"num_hidden_layers": 7, "vocab_size_per_layer_input": 96})
    assert config.windows == (512,) * 5 + (None,) * 2  # the last layer has none, whatever its turn
    assert config.kv_shapes == ((2, 256),) * 5 + ((2, 512),) * 2
    assert (config.max_positions, config.logit_cap, config.epsilon) == (131_072, None, 1e-6)


def test_heads_of_single_layers_are_read_as_transformers_writes_them() -> None:
    raw = CONFIGS["keys are values"]
    written = {name: value for name, value in raw.items() if "global" not in name}
    written |= {"per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}}}
    assert gemma4_text.read_config(written) == gemma4_text.read_config(raw)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_kv_shared_layers": 3}, CheckpointError, "should leave a layer of each kind with keys .*, found 3"),
        ({"num_kv_shared_layers": -1}, CheckpointError, "should leave a layer of each kind with keys .*, found -1"),
        ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, CheckpointError, "layer 1 has 3 key/value heads"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, CheckpointError, "layer 0 has 2 key/value heads of 4: .* one w"),
        ({"per_layer_config": {"0": {"sliding_window": 4}}}, UnsupportedModelError, "layers of one shape but for"),
        ({"vocab_size_per_layer_input": 95}, UnsupportedModelError, "vocab_size_per_layer_input is 95; minillm runs"),
        ({"use_bidirectional_attention": "all"}, UnsupportedModelError, "use_bidirectional_attention is 'all'"),
        ({"rope_parameters": {"rope_theta": 5.0}}, UnsupportedModelError, "rope_parameters has 'rope_theta'; expected"),
        ({"rope_parameters": {"full_attention": {}}}, CheckpointError, "rope_theta is missing"),
        (
            {"rope_parameters": gemma4_text.ROTARY | {"full_attention": {"rope_type": "yarn", "rope_theta": 5.0}}},
            UnsupportedModelError,
            "rope_type is 'yarn'; minillm runs 'default', 'linear', 'proportional'",
        ),
        ({"enable_moe_block": True}, CheckpointError, "num_experts is missing"),
        (
            {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3},
            CheckpointError,
            "top_k_experts 3 should be at most num_experts 2",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gemma4_text.read_config(CONFIG | change)


def test_keys_that_layers_do_not_read_are_left_out_of_checkpoints() -> None:
    raw = CONFIGS["per-layer embeddings"]
    config, tensors = gemma4_text.read_config(raw), tiny_tensors(raw)
    unread = {f"model.layers.3.self_attn.{name}.weight": tensors["norm.weight"] for name in ("k_proj", "v_proj")}
    assert canonical_names({**tensors, **unread}, config).keys() == tensors.keys()


def test_stages_are_refused() -> None:
    config = gemma4_text.read_config(CONFIG)
    with pytest.raises(ParameterError, match="pipeline_parallel 2 is not offered with per-layer embeddings"):
        Parallel(pipeline=2).check_layers(config.num_layers, 0, config.per_layer_width)


def test_the_table_of_all_layers_is_mapped_and_only_rows_of_it_are_read(tmp_path: Path) -> None:
    """Rows of other tokens may be no numbers at all."""
    raw = CONFIGS["per-layer embeddings"]
    tensors = {name: tensor.load() for name, tensor in tiny_tensors(raw).items()}
    line = list(range(3, 40))
    expected = logits_of(
        runner_of(build_model(config_of(raw), {n: Held(t) for n, t in tensors.items()}, NumpyBackend())), line
    )
    tensors["embed_tokens_per_layer.weight"][40:] = np.nan
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    for backend in (NumpyBackend(), CpuBackend()):
        model = load_model(tmp_path, backend)
        assert not model.per_layer.table.data.flags.owndata
        runner = runner_of(model, backend=backend)
        output = runner.forward([TokenSequence(line)], [len(line)], rows=range(len(line)))
        np.testing.assert_allclose(output.logits, expected, rtol=0, atol=1e-4)
