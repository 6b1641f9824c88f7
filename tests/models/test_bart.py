"""BART's configuration and names, and what mBART, Pegasus and MarianMT share with it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm.backends.numpy import NumpyBackend
from minillm.backends.storage import expand
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.canonical import canonical_names
from minillm.formats.load_model import load_model
from minillm.formats.write_checkpoint import write_checkpoint
from minillm.models import bart, build_model, family_named, tensor_shapes
from minillm.models.base import weights_of

from ..tiny import Held, tiny_tensors

CONFIG: dict[str, Any] = {
    "model_type": "bart",
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "base": CONFIG,
    "scaled": CONFIG | {"scale_embedding": True, "activation_function": "gelu_new", "max_position_embeddings": 80},
    "other sizes": CONFIG
    | {
        "encoder_layers": 1,
        "decoder_layers": 3,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "activation_function": "relu",
    },
}

PARAMETERS = {"bart-base": 139_420_416 + 50_265, "bart-large-cnn": 406_290_432 + 50_264}
"""As transformers counts them in the published checkpoints, and the bias of their logits, which it does not count."""

FAMILIES = ("bart", "mbart", "pegasus", "marian")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"d_model": None}, CheckpointError, "d_model is missing"),
        ({"decoder_ffn_dim": 0}, CheckpointError, "decoder_ffn_dim should be at least 1, found 0"),
        ({"encoder_layers": None}, CheckpointError, "encoder_layers is missing"),
        ({"d_model": 30}, CheckpointError, "d_model 30 should be a multiple of decoder_attention_heads 4"),
        (
            {"encoder_attention_heads": 8},
            UnsupportedModelError,
            "encoder_attention_heads is 8 and decoder_attention_heads 4; minillm runs stacks with the same number",
        ),
        ({"activation_function": "mish"}, UnsupportedModelError, "activation_function is 'mish'; minillm runs"),
        ({"is_encoder_decoder": False}, UnsupportedModelError, "is_encoder_decoder is False; in this family minillm"),
        ({"normalize_before": True}, UnsupportedModelError, "normalize_before is True; in this family minillm runs Fa"),
        ({"static_position_embeddings": True}, UnsupportedModelError, "static_position_embeddings is True; in this"),
        ({"tie_word_embeddings": False}, UnsupportedModelError, "tie_word_embeddings is False; in this family"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        bart.read_config(CONFIG | change)


@pytest.mark.parametrize(
    ("family", "start", "eos", "switches"),
    [
        ("bart", 2, 2, (False, True, True, False)),
        ("mbart", None, 2, (True, True, True, True)),
        ("pegasus", 0, 1, (True, False, False, True)),
        ("marian", 58100, 0, (False, False, False, False)),
    ],
)
def test_families_differ_in_norms_positions_and_special_tokens(
    family: str, start: int | None, eos: int, switches: tuple[bool, ...]
) -> None:
    """Defaults as of transformers' configurations."""
    raw = {name: value for name, value in CONFIG.items() if name not in ("decoder_start_token_id", "model_type")}
    config = family_named(family).read_config(raw)
    assert (config.decoder_start_token_id, config.eos_token_ids) == (start, (eos,))
    assert (config.pre_norm, config.embedding_norm, config.learned_positions, config.final_norm) == switches
    assert (config.activation, config.embedding_scale, config.encoder_layers, config.num_layers) == ("gelu", 1.0, 3, 2)
    assert (config.intermediate_size, config.encoder_intermediate_size) == (48, 40)


def test_sinusoidal_positions_are_those_of_the_paper_sines_first() -> None:
    for E in (8, 7):
        table = bart.sinusoidal_positions(50, E)
        assert table.shape == (50, E)
        for position in (0, 1, 49):
            for i in range(E // 2):
                angle = position / 10000 ** (2 * i / E)
                half = (E + 1) // 2
                np.testing.assert_allclose(table[position, [i, half + i]], [np.sin(angle), np.cos(angle)], atol=1e-6)


def stored(family: str) -> dict[str, Held]:
    """A checkpoint's tensors by the names of memory, as released versions wrote them: with every copy."""
    raw = CONFIG | {"model_type": family}
    tensors = {f"model.{name}": Held(tensor.load()) for name, tensor in tiny_tensors(raw).items()}
    tensors["final_logits_bias"] = Held(tensors.pop("model.final_logits_bias").load()[None])
    shared = tensors["model.shared.weight"]
    return tensors | {
        "lm_head.weight": shared,
        "model.encoder.embed_tokens.weight": shared,
        "model.decoder.embed_tokens.weight": shared,
        "model.encoder.version": Held(np.full(1, 3, np.float32)),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_of_the_embedding_are_left_out_or_taken(family: str) -> None:
    """And the prefix, a version number, and computed positions."""
    module, tensors = family_named(family), stored(family)
    config = module.read_config(CONFIG | {"model_type": family})
    if not config.learned_positions:
        names = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]
        tensors |= dict.fromkeys(names, Held(np.zeros((64, 32))))
    expected = set(tensor_shapes(config))
    assert set(canonical_names(tensors, config)) == expected
    names = [name for name, tensor in tensors.items() if tensor is tensors["model.shared.weight"]]
    for kept in names:
        others = {name: tensor for name, tensor in tensors.items() if name == kept or name not in names}
        assert set(canonical_names(others, config)) == expected
        build_model(config, canonical_names(others, config), NumpyBackend(), as_built=False)
    for name in names[2:]:
        with pytest.raises(CheckpointError, match="encoder and a decoder with one embedding"):
            canonical_names(tensors | {name: Held(tensors[name].load() + 1)}, config)


def test_logits_without_a_bias_in_the_checkpoint_have_none(tmp_path: Path) -> None:
    """As in facebook/bart-base, whose tensors have no prefix either."""
    tensors = {name.removeprefix("model."): tensor.load() for name, tensor in stored("bart").items()}
    bias = tensors.pop("final_logits_bias")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    states = np.ones((1, 32), np.float32)
    without = load_model(tmp_path, backend := NumpyBackend()).logits(backend, states).copy()
    np.testing.assert_allclose(without, states @ tensors["shared.weight"].T, atol=1e-5)
    save_file(tensors | {"final_logits_bias": bias}, tmp_path / "model.safetensors")
    np.testing.assert_allclose(load_model(tmp_path, backend).logits(backend, states), without + bias, atol=1e-5)
    assert np.abs(bias).max() > 0.1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_written_in_fewer_bits_is_what_is_rounded_at_load(family: str, dtype: str, tmp_path: Path) -> None:
    """Also where the bias of logits is not in the checkpoint; it is never rounded."""
    tensors = {name: tensor.load() for name, tensor in stored(family).items()}
    if family == "bart":
        del tensors["final_logits_bias"]
    (tmp_path / "in").mkdir()
    save_file({name: array.copy() for name, array in tensors.items()}, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps(CONFIG | {"model_type": family}), encoding="utf-8")
    write_checkpoint(tmp_path / "in", tmp_path / "out", dtype)
    written = weights_of(load_model(tmp_path / "out", NumpyBackend(weights="auto")))
    rounded = weights_of(load_model(tmp_path / "in", NumpyBackend(weights=dtype)))
    for ours, expected in zip(written, rounded, strict=True):
        assert ours.name == expected.name
        np.testing.assert_array_equal(expand(ours.data), expand(expected.data))
        assert (ours.bias is None) == (expected.bias is None)
        if expected.bias is not None:
            np.testing.assert_array_equal(ours.bias, expected.bias)
