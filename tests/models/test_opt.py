"""OPT's configuration and tensor table."""

import math
from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.models import build_model, family_of, opt, published, published_config, tensor_shapes
from minillm.models.building import random_tensors

from ..tiny import VARIANTS, tiny_config, tiny_tensors

CONFIGS = {name: tiny_config(name) for name in VARIANTS}

PARAMETERS = {
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
}
"""As transformers counts them in the published checkpoints."""


@pytest.mark.parametrize("shape", [name for name in published() if name.startswith("opt-")])
def test_published_sizes_are_what_their_names_say(shape: str) -> None:
    table = tensor_shapes(published_config(shape))
    number, unit = float(shape[4:-1]), {"m": 1e6, "b": 1e9}[shape[-1]]
    assert sum(math.prod(size) for size in table.values()) == pytest.approx(number * unit, rel=0.06)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_size": None}, CheckpointError, "hidden_size is missing"),
        ({"hidden_size": 33}, CheckpointError, "hidden_size 33 should be a multiple of num_attention_heads 4"),
        ({"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers should be at least 1, found 0"),
        ({"ffn_dim": "40"}, CheckpointError, "ffn_dim should be a whole number, found '40'"),
        ({"do_layer_norm_before": "yes"}, CheckpointError, "do_layer_norm_before should be true or false, found 'yes'"),
        ({"eos_token_id": "x"}, CheckpointError, "eos_token_id should be token ids, found 'x'"),
        (
            {"activation_function": "mish"},
            UnsupportedModelError,
            "activation_function is 'mish'; minillm runs 'relu', 'gelu', 'gelu_new', 'silu', 'relu2'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_named(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        opt.read_config(tiny_config() | change)


@pytest.mark.parametrize("model_type", ["t6", None])
def test_another_family_is_named_with_those_that_run(model_type: str | None) -> None:
    with pytest.raises(UnsupportedModelError, match=f"model_type is {model_type!r}; minillm runs 'opt', 'llama'"):
        family_of({"model_type": model_type})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.fc1.bias"), r"lacks tensor layers\.1\.fc1\.bias"),
        (lambda t: t.update({"layers.2.fc1.bias": t["layers.1.fc1.bias"]}), r"holds tensor layers\.2\.fc1\.bias"),
        (
            lambda t: t.update({"layers.0.fc1.bias": t["layers.0.fc2.bias"]}),
            r"layers\.0\.fc1\.bias should have shape \[40\]",
        ),
    ],
    ids=["missing", "extra", "misshaped"],
)
def test_a_tensor_that_does_not_fit_is_named(change, message: str) -> None:
    raw = tiny_config()
    tensors = tiny_tensors(raw)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        build_model(opt.read_config(raw), tensors, NumpyBackend())


def test_random_tensors_follow_seed_and_name_and_their_spread() -> None:
    table = {"a.weight": (200, 50), "b.weight": (200, 50), "x_norm.weight": (5000,)}
    one, same, other = (random_tensors(table, seed, 0.02, NumpyBackend()) for seed in (1, 1, 2))
    a = one["a.weight"].load()
    np.testing.assert_array_equal(a, same["a.weight"].load())
    assert (a != one["b.weight"].load()).mean() > 0.99
    assert (a != other["a.weight"].load()).mean() > 0.99
    assert a.std() == pytest.approx(0.02, rel=0.05)
    assert one["x_norm.weight"].load().mean() == pytest.approx(1, abs=0.01)
