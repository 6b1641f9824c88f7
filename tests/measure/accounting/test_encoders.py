"""The model of shapes against the calls that are really made, for encoders and for heads of labels."""

import math
from typing import Any

import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.backends.observe import counting
from minillm.measure import accounting
from minillm.measure.accounting import Part, Step, Storage, activation_bytes, cache_bytes_per_token
from minillm.models import config_of, tensor_shapes

from ...encoders import CONFIGS, runner_over, sequence_of
from ...tiny import CONFIG, model_of
from . import closed_form
from .agreement import assert_agree
from .test_storage import StoringBackend

LENGTHS = [7, 1, 30, 12]
DECODERS: dict[str, dict[str, Any]] = {
    "opt, labels": CONFIG | {"architectures": ["OPTForSequenceClassification"], "num_labels": 3},
    "gpt2, labels": {
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "architectures": ["GPT2ForSequenceClassification"],
    },
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("raw", [*CONFIGS.values(), *DECODERS.values()], ids=[*CONFIGS, *DECODERS])
def test_a_pass_counts_what_the_model_of_shapes_says(raw: dict[str, Any]) -> None:
    model, backend = model_of(raw), NumpyBackend()
    config, runner = config_of(raw), runner_over(model, backend)
    held = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    assert accounting.parameter_count(config) == held
    stops = [sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS))]
    rows = [0, *stops[:-1]] if config.bidirectional else [stop - 1 for stop in stops]
    with counting(runner) as counted:
        runner.forward([sequence_of(model, [5] * length) for length in LENGTHS], LENGTHS, rows=rows)
    step = Step(tuple(Part(length, length) for length in LENGTHS), len(LENGTHS))
    assert_agree(config, [step], counted)
    assert accounting.step_flops(config, step) == counted.total.flops
    fresh = NumpyBackend()
    runner = runner_over(model, fresh)
    for _ in range(3):
        runner.forward([sequence_of(model, [5] * 17)], [17], rows=[0, 16])
        assert fresh.memory.arena.nbytes == activation_bytes(config, Storage(), 17, 2)


def test_an_encoder_keeps_the_keys_of_one_layer() -> None:
    config = config_of(CONFIGS["bert"])
    assert config.num_layers == 3
    assert cache_bytes_per_token(config, Storage()) == 2 * 32 * 4


def test_a_decoder_with_labels_is_the_closed_form_and_as_large_as_it_says() -> None:
    config, step = config_of(DECODERS["opt, labels"]), Step((Part(7, 7), Part(12, 12)), 2)
    assert accounting.operations(config, step) == closed_form.operations(config, step)
    for dtype in ("float32", "float16", "int8", "int4"):
        storage = Storage(weights=dtype)
        assert accounting.weights_bytes(config, storage) == closed_form.weights_bytes(config, storage)


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["int4", "int8", "float16"])
def test_weights_are_as_large_as_stored(dtype: str) -> None:
    for raw in (*CONFIGS.values(), *DECODERS.values()):
        backend = StoringBackend(dtype, "float32")
        model_of(raw, backend=backend)
        stored = sum(weight.nbytes for weight in backend.loader.held)
        assert stored == accounting.weights_bytes(config_of(raw), Storage(weights=dtype))
