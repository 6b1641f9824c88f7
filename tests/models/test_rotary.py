"""Rotary frequencies of every kind, as config.json says them in both of its ways; texts beyond the original length."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.config import Fields
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.load_model import load_model
from minillm.models.rotary import read_rotary

from ..tiny import chunks, generate, runner_of
from .test_llama import CONFIG

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with weights": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 48,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn with a scale": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_both_ways_of_saying_it_are_one(name: str) -> None:
    new = CONFIG | {"rope_parameters": SCALINGS[name] | {"rope_theta": 700.0}}
    old = CONFIG | {"rope_scaling": SCALINGS[name], "rope_theta": 700.0}
    oldest = CONFIG | {"rope_theta": 700.0}
    oldest["rope_scaling"] = {"type" if key == "rope_type" else key: value for key, value in SCALINGS[name].items()}
    read = [read_rotary(Fields(raw), 16, 64) for raw in (new, old, oldest)]
    assert read[0] == read[1] == read[2]
    assert read[0] != read_rotary(Fields(CONFIG | {"rope_theta": 700.0}), 16, 64)


def test_frequencies_fall_from_one_by_a_constant_ratio() -> None:
    frequencies = read_rotary(Fields({"rope_theta": 10000.0}), 8, 64).frequencies
    np.testing.assert_allclose(frequencies, [1, 0.1, 0.01, 0.001], rtol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 64),
        (SCALINGS["linear"], 160),
        (SCALINGS["dynamic"], 128),
        (SCALINGS["yarn"], 128),
        (SCALINGS["llama3"], 64),  # its max_position_embeddings is the length that the scaling reaches
    ],
    ids=["default", "linear", "dynamic", "yarn", "llama3"],
)
def test_the_longest_context_that_a_scaling_is_made_for(scaling: dict[str, Any] | None, longest: int) -> None:
    assert read_rotary(Fields({"rope_scaling": scaling}), 8, 64).longest == longest


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "rope_scaling: factor is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor should be at least 1, found 0.5"),
        ({"rope_type": "linear", "factor": "2"}, "factor should be a finite number, found '2'"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}, "high_freq_factor is missing"),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "high_freq_factor 4.0 should be above low_freq_factor 4.0",
        ),
        ("linear", "rope_scaling should be a table, found 'linear'"),
    ],
)
def test_an_impossible_scaling_is_named(scaling: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_rotary(Fields({"rope_scaling": scaling}), 8, 64)


def test_tables_that_contradict_each_other_are_refused() -> None:
    linear, yarn = SCALINGS["linear"], SCALINGS["yarn"]
    with pytest.raises(CheckpointError, match="rope_parameters and rope_scaling differ: leave one of them out"):
        read_rotary(Fields({"rope_parameters": linear | {"rope_theta": 700.0}, "rope_scaling": linear}), 8, 64)
    read_rotary(Fields({"rope_parameters": linear, "rope_scaling": linear}), 8, 64)
    with pytest.raises(UnsupportedModelError, match="'full_attention' is a table; minillm runs one for all layers"):
        read_rotary(Fields({"rope_parameters": {"full_attention": linear, "rope_type": "linear", "factor": 2}}), 8, 64)
    original = {"original_max_position_embeddings": 16}
    with pytest.raises(CheckpointError, match="original_max_position_embeddings should be 16, as beside the table"):
        read_rotary(Fields({"rope_scaling": yarn} | original), 8, 64)


def test_the_original_length_may_stand_beside_the_table() -> None:
    yarn = dict(SCALINGS["yarn"])
    inside = read_rotary(Fields({"rope_scaling": yarn}), 8, 64)
    original = yarn.pop("original_max_position_embeddings")
    beside = {"rope_scaling": yarn, "original_max_position_embeddings": original}
    assert read_rotary(Fields(beside), 8, 64) == inside != read_rotary(Fields({"rope_scaling": yarn}), 8, 64)


@pytest.mark.reference
@pytest.mark.parametrize("name", SCALINGS)
def test_texts_beyond_the_original_length(name: str, tmp_path: Path) -> None:
    """One pass over 100 tokens, twice as many as some were made for; chunks of it; and 40 tokens generated past it."""
    pytest.importorskip("transformers", reason="needs the reference extra")
    from .. import huggingface

    raw = CONFIG | {"rope_parameters": SCALINGS[name] | {"rope_theta": 10000.0}}
    model, line = huggingface.build_model(raw, 7), np.random.default_rng(3).integers(3, 96, 100).tolist()
    huggingface.save(model, tmp_path)
    ours, theirs = load_model(tmp_path, NumpyBackend()), huggingface.logits(model, line)
    for chunk in (100, 37):
        runner = runner_of(ours, page_size=16)
        np.testing.assert_allclose(chunks(runner, line, chunk), theirs, rtol=0, atol=1e-4)
    prompt = line[:50]
    expected = huggingface.generate(huggingface.build_model(raw, 7), prompt, max_new_tokens=40)[0][0]
    assert len(set(expected)) >= 8
    assert generate(runner_of(ours, page_size=16), [prompt, line[:5]], max_new_tokens=40)[0] == expected


WRONG = [0, -1, -1e308, 1e-320, 1e308, 10**300, 10**400, float("nan"), float("inf"), True, "2", [2], {"a": 2}]


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", WRONG, ids=lambda value: f"{value!s:.12}")
@pytest.mark.parametrize("name", SCALINGS)
def test_any_number_in_any_field_is_frequencies_or_one_line(name: str, value: Any) -> None:
    fields = {
        *("rope_theta", "factor", "original_max_position_embeddings", "mscale", "mscale_all_dim", "beta_fast"),
        *("beta_slow", "attention_factor", "low_freq_factor", "high_freq_factor", "truncate", "rope_type"),
    }
    for field in sorted(fields):
        try:
            config = read_rotary(Fields({"rope_parameters": SCALINGS[name] | {field: value}}), 16, 64)
        except (CheckpointError, UnsupportedModelError) as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 250
        else:
            numbers = [*config.frequencies, config.scale, config.longest]
            assert np.all(np.isfinite(numbers)), field
            assert config.longest <= 2**24


def test_weights_that_cancel_the_scale_are_refused() -> None:
    """0.1 * mscale_all_dim * ln 4 + 1 would be 0."""
    scaling = SCALINGS["yarn"] | {"mscale": 1.0, "mscale_all_dim": -10 / np.log(4.0)}
    with pytest.raises(CheckpointError, match="mscale_all_dim should be above 0"):
        read_rotary(Fields({"rope_parameters": scaling}), 16, 64)
