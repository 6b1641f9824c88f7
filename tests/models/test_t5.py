"""T5's configuration, its buckets of distances, and the names and ties of its checkpoints."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.canonical import canonical_names
from minillm.models import build_model, t5, tensor_shapes
from minillm.models.distance_bias import buckets_of

from ..tiny import Held, tiny_tensors

CONFIG: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 10,
    "d_ff": 40,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "feed_forward_proj": "relu",
    "decoder_start_token_id": 0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "original": CONFIG,
    "gated, untied": CONFIG | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "other sizes": CONFIG
    | {
        "d_kv": 8,
        "num_decoder_layers": 3,
        "num_heads": 3,
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 16,
        "feed_forward_proj": "gated-silu",
        "layer_norm_epsilon": 1e-3,
    },
}

PARAMETERS = {"t5-small": 60_506_624, "t5-base": 222_903_552, "flan-t5-small": 76_961_152, "flan-t5-base": 247_577_856}
"""As transformers counts them in the published checkpoints."""


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"d_model": None}, CheckpointError, "d_model is missing"),
        ({"d_kv": 0}, CheckpointError, "d_kv should be at least 1, found 0"),
        ({"num_decoder_layers": 0}, CheckpointError, "num_decoder_layers should be at least 1, found 0"),
        ({"feed_forward_proj": "gated-mish"}, UnsupportedModelError, "feed_forward_proj is 'gated-mish'; minillm runs"),
        ({"feed_forward_proj": "some-relu"}, UnsupportedModelError, "feed_forward_proj is 'some-relu'; minillm runs"),
        ({"relative_attention_num_buckets": 2}, CheckpointError, "relative_attention_num_buckets 2"),
        ({"relative_attention_max_distance": 4}, CheckpointError, "max_distance 4 should be more than half"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        t5.read_config(CONFIG | change)


def test_defaults_are_those_of_transformers() -> None:
    sizes = {name: CONFIG[name] for name in ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")}
    config = t5.read_config(sizes)
    assert (config.num_layers, config.encoder_layers, config.buckets, config.max_distance) == (3, 3, 32, 128)
    assert (config.activation, config.gated, config.tied_head, config.scaled_head) == ("relu", False, True, True)
    assert (config.decoder_start_token_id, config.eos_token_ids) == (0, (1,))


def test_the_head_is_scaled_unless_the_original_configuration_unties_it() -> None:
    """transformers 5 writes tie_word_embeddings as true, and scale_decoder_outputs as it was."""
    assert not t5.read_config(CONFIG | {"tie_word_embeddings": False}).scaled_head
    assert not t5.read_config(CONFIG | {"tie_word_embeddings": True, "scale_decoder_outputs": False}).scaled_head


def test_buckets_of_distances_as_the_paper_has_them() -> None:
    """Half of the buckets are single distances, the others grow by a factor, up to the largest distance."""
    behind = buckets_of(-np.arange(200), 32, 128, both=False)
    assert behind[:16].tolist() == [*range(16)]
    assert behind[15:].tolist() == sorted(behind[15:].tolist())
    assert behind[128:].tolist() == [31] * 72
    assert behind[16:20].tolist() == [16, 16, 16, 17]
    assert buckets_of(np.arange(1, 9), 32, 128, both=False).tolist() == [0] * 8
    both = buckets_of(np.arange(-200, 201), 32, 128, both=True)
    assert (both[200], both[199], both[201], both[0], both[400]) == (0, 1, 17, 15, 31)
    np.testing.assert_array_equal(both[201:] - 16, both[:200][::-1])


def stored_as_published() -> dict[str, Any]:
    tensors = {name: Held(tensor.load()) for name, tensor in tiny_tensors(CONFIG).items()}
    for stack in ("encoder", "decoder"):
        tensors[f"{stack}.embed_tokens.weight"] = tensors["shared.weight"]
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return tensors | {name: Held(np.ones((8, 4), np.float32))}


def test_names_and_leftovers_of_published_checkpoints() -> None:
    config = t5.read_config(CONFIG)
    tensors = canonical_names(stored_as_published(), config)
    assert set(tensors) == set(tensor_shapes(config))
    build_model(config, tensors, NumpyBackend(), as_built=False)


@pytest.mark.parametrize("said", [True, False])
def test_the_tensors_decide_whether_the_head_is_tied(said: bool) -> None:
    stored = stored_as_published()
    assert t5.NAMES.ties_head(stored, said)
    copy = Held(stored["shared.weight"].load())
    assert t5.NAMES.ties_head(stored | {"lm_head.weight": copy}, said)
    assert not t5.NAMES.ties_head(stored | {"lm_head.weight": Held(copy.load() + 1)}, said)
