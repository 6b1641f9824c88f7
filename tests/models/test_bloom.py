"""BLOOM's configuration, tensor table and slopes."""

from typing import Any

import numpy as np
import pytest

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import bloom

from ..tiny import logits_of, model_of, runner_of

CONFIG: dict[str, Any] = {
    "model_type": "bloom",
    "vocab_size": 96,
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "four heads": CONFIG,
    "six heads, untied": CONFIG | {"hidden_size": 48, "n_head": 6, "tie_word_embeddings": False},
    "one head, another epsilon": CONFIG | {"n_head": 1, "n_layer": 3, "layer_norm_epsilon": 1e-2},
}

PARAMETERS = {
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom": 176_247_271_424,
}
"""As their model cards have them."""


def test_slopes_of_a_power_of_two_and_of_another_number() -> None:
    """The paper's for 8 heads: 1/2, 1/4 ... 1/256; 16 interpolate; between, those of 8 and every other of 16."""
    eight = [2.0**-i for i in range(1, 9)]
    np.testing.assert_allclose(bloom.alibi_slopes(8), eight)
    np.testing.assert_allclose(bloom.alibi_slopes(16)[1::2], eight)
    np.testing.assert_allclose(bloom.alibi_slopes(11), [*eight, *bloom.alibi_slopes(16)[0:6:2]])
    np.testing.assert_allclose(bloom.alibi_slopes(1), [2.0**-8])


def test_both_names_of_a_size_are_read() -> None:
    newer = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    renamed = {newer.get(name, name): value for name, value in CONFIG.items()}
    assert bloom.read_config(renamed) == bloom.read_config(CONFIG)
    assert bloom.read_config(CONFIG | {"seq_length": 512}).max_positions == 512
    assert bloom.read_config(CONFIG).max_positions == 2048


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"n_head": 5}, CheckpointError, "hidden_size 32 should be a multiple of num_attention_heads 5"),
        ({"n_layer": None}, CheckpointError, "num_hidden_layers is missing"),
        (
            {"apply_residual_connection_post_layernorm": True},
            UnsupportedModelError,
            "apply_residual_connection_post_layernorm is true",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        bloom.read_config(CONFIG | change)


@pytest.mark.longer
def test_a_text_may_be_longer_than_any_table_of_positions() -> None:
    """What lies far back fades: the last logits of a long text change less by its first tokens than by late ones."""
    runner = runner_of(model_of(CONFIG))
    line = np.random.default_rng(0).integers(3, 96, 400).tolist()
    last = logits_of(runner, line)[-1]

    def change(position: int) -> float:
        other = [*line[:position], line[position] ^ 1, *line[position + 1 :]]
        return float(np.abs(logits_of(runner, other)[-1] - last).max())

    assert sum(map(change, range(1, 6))) < 0.2 * sum(map(change, range(391, 396)))
