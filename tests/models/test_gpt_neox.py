"""GPT-NeoX's configuration, tensor table and the names and rows of its checkpoints."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.canonical import canonical_names
from minillm.models import build_model, gpt_neox, tensor_shapes

from ..tiny import Held, logits_of, runner_of, tiny_tensors

CONFIG: dict[str, Any] = {
    "model_type": "gpt_neox",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rotary_pct": 0.5,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "parallel": CONFIG,
    "in turn, without biases": CONFIG
    | {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 0.75, "rotary_emb_base": 300},
    "tied, all turns": CONFIG
    | {
        "tie_word_embeddings": True,
        "intermediate_size": 48,
        "hidden_act": "gelu_fast",
        "layer_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 1.0},
    },
}

PARAMETERS = {
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
}
"""As their model cards have them."""


@pytest.mark.parametrize(
    ("change", "pairs", "second"),
    [
        ({"rotary_pct": None}, 1, None),  # a quarter of eight numbers
        ({"rotary_pct": 0.5, "rotary_emb_base": 100}, 2, 0.1),  # 100^(-2 / 4)
        ({"rotary_pct": 0.5, "rope_parameters": {"rope_theta": 16.0, "partial_rotary_factor": 1.0}}, 4, 0.5),
        ({"rotary_pct": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 4, 0.05),  # 10000^(-2 / 8) / 2
    ],
)
def test_how_many_numbers_turn_and_how_fast(change: dict[str, Any], pairs: int, second: float | None) -> None:
    frequencies = gpt_neox.read_config(CONFIG | change).rotary.frequencies
    assert len(frequencies) == pairs
    if second is not None:
        assert frequencies[1] == pytest.approx(second, rel=1e-6)


def test_names_of_transformers_4_beside_the_older_ones() -> None:
    """It writes both, of which it reads the older; another number under the newer would have no effect there."""
    both = {"rotary_pct": 0.5, "rotary_emb_base": 100, "rope_theta": 100, "partial_rotary_factor": 0.5}
    assert gpt_neox.read_config(CONFIG | both).rotary.frequencies == pytest.approx((1.0, 0.1))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_size": 33}, CheckpointError, "hidden_size 33 should be a multiple of num_attention_heads 4"),
        ({"intermediate_size": None}, CheckpointError, "intermediate_size is missing"),
        ({"rotary_pct": 0.4}, CheckpointError, "needs an even width of at least 2, found 3"),
        ({"rotary_pct": 1.5}, CheckpointError, r"\(or rotary_pct\) should be above 0 and at most 1, found 1.5"),
        (
            {"rope_parameters": {"partial_rotary_factor": "all"}},
            CheckpointError,
            "partial_rotary_factor should be a finite number, found 'all'",
        ),
        ({"rope_theta": 500.0}, CheckpointError, "rope_theta should be 10000 as rotary_emb_base or the rotary table"),
        ({"partial_rotary_factor": 1.0}, CheckpointError, "partial_rotary_factor should be 0.5 as rotary_pct or"),
        ({"head_dim": 16}, CheckpointError, "head_dim should be hidden_size / num_attention_heads = 8"),
        ({"rope_parameters": {"rope_type": "longrope"}}, UnsupportedModelError, "rope_type is 'longrope'"),
        ({"hidden_act": "mish"}, UnsupportedModelError, "hidden_act is 'mish'; minillm runs 'relu', 'gelu'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gpt_neox.read_config(CONFIG | change)


def interleave(array: np.ndarray) -> np.ndarray:
    """Rows Q of all heads, K, V to rows of one head after the other: the place of each one worked out by itself."""
    out = np.empty_like(array)
    for part in range(3):
        for head in range(4):
            for row in range(8):
                out[head * 24 + part * 8 + row] = array[part * 32 + head * 8 + row]
    return out


def stored_as_published(prefix: str) -> dict[str, Any]:
    """The tensors of `CONFIG` as a checkpoint has them."""
    canonical = {name: tensor.load() for name, tensor in tiny_tensors(CONFIG).items()}
    return {
        name if name.startswith("embed_out") else prefix + name: Held(
            interleave(array) if "query_key_value" in name else array
        )
        for name, array in canonical.items()
    }


@pytest.mark.parametrize("prefix", ["", "gpt_neox."])
@pytest.mark.parametrize("head", ["embed_out.weight", "lm_head.weight"])
def test_names_rows_and_leftovers_of_published_checkpoints(prefix: str, head: str) -> None:
    config = gpt_neox.read_config(CONFIG)
    stored = stored_as_published(prefix)
    stored[head] = stored.pop("embed_out.weight")
    for i in range(config.num_layers):
        part = f"{prefix}layers.{i}.attention"
        stored[f"{part}.bias"] = Held(np.tril(np.ones((1, 1, 64, 64), bool)))
        stored[f"{part}.masked_bias"] = Held(np.float32(-1e9))
        stored[f"{part}.rotary_emb.inv_freq"] = Held(np.ones(2, np.float32))
    tensors = canonical_names(stored, config)
    assert set(tensors) == set(tensor_shapes(config))
    line = list(range(3, 30))
    ours, plain = (
        logits_of(runner_of(build_model(config, weights, NumpyBackend(), as_built=as_built)), line)
        for weights, as_built in ((tensors, False), (tiny_tensors(CONFIG), True))
    )
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(95, 32), (0, 32), (), (48, 32)])
def test_a_projection_of_another_shape_is_named(shape: tuple[int, ...]) -> None:
    config = gpt_neox.read_config(CONFIG)
    stored = stored_as_published("") | {"layers.1.attention.query_key_value.weight": Held(np.zeros(shape, np.float32))}
    with pytest.raises(CheckpointError, match=r"layers\.1\.attention\.query_key_value\.weight should have shape \[96"):
        build_model(config, canonical_names(stored, config), NumpyBackend(), as_built=False)
