"""Tensors and entries of an index for which a model has no place: left out in one line if they change nothing."""

import json
import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minillm import Engine
from minillm.errors import CheckpointError
from minillm.formats.write_checkpoint import write_checkpoint as quantise

from ..tiny import write_checkpoint

LINE = [3, 17, 40, 9, 77]
EXTRAS = {
    "a value head": {
        "v_head.summary.weight": np.ones((1, 32), np.float32),
        "v_head.summary.bias": np.ones(1, np.float32),
    },
    "layers that predict further tokens": {"mtp.layers.0.input_layernorm.weight": np.ones(32, np.float32)},
    "tensors without numbers": {"model.decoder.empty": np.zeros((0, 7), np.float32)},
    "a head's bias of zeros": {"lm_head.bias": np.zeros(512, np.float32)},
}


def logits(folder):
    with Engine(folder) as engine:
        return engine.forward(LINE)


def add(folder, tensors):
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)


@pytest.mark.parametrize("extra", EXTRAS)
def test_they_are_left_out_in_one_line(tmp_path, caplog, extra):
    folder = write_checkpoint(tmp_path / "m", "untied")
    expected = logits(folder)
    add(folder, EXTRAS[extra])
    with caplog.at_level(logging.WARNING, "minillm"):
        np.testing.assert_array_equal(logits(folder), expected)
    [line] = [message for message in caplog.messages if "left out, for the model has no place for them" in message]
    assert all(name.removeprefix("model.decoder.") in line for name in EXTRAS[extra])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lm_head.bias", np.full(512, 0.1, np.float32)),
        ("lm_head.bias", np.zeros(7, np.float32)),
        ("model.decoder.layers.0.adapter.weight", np.ones((4, 4), np.float32)),
    ],
)
def test_what_would_change_the_result_is_refused(tmp_path, name, value):
    folder = write_checkpoint(tmp_path / "m", "untied")
    add(folder, {name: value})
    with pytest.raises(CheckpointError, match=rf"the checkpoint holds tensor {name.removeprefix('model.decoder.')}"):
        logits(folder)


def test_they_are_not_quantised_either(tmp_path):
    folder = write_checkpoint(tmp_path / "m", "untied")
    add(folder, EXTRAS["a value head"])
    quantise(folder, tmp_path / "small", "int8")
    with Engine(tmp_path / "small") as engine:
        engine.forward(LINE)


def sharded(folder, more):
    """The checkpoint in two shards, and an index that lists more."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    place = {}
    for i, part in enumerate((names[:5], names[5:]), 1):
        save_file({name: tensors[name] for name in part}, folder / f"model-0000{i}-of-00002.safetensors")
        place |= dict.fromkeys(part, f"model-0000{i}-of-00002.safetensors")
    listed = place | dict.fromkeys(more, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def test_an_index_may_list_the_head_of_a_model_whose_head_is_its_embedding(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "m")
    expected = logits(folder)
    sharded(folder, ["lm_head.weight"])
    with caplog.at_level(logging.WARNING, "minillm"):
        np.testing.assert_array_equal(logits(folder), expected)
    assert f"{folder}: the index lists lm_head.weight, which no file holds: left out" in caplog.messages


def test_a_head_of_its_own_that_no_file_holds_is_missing(tmp_path):
    folder = write_checkpoint(tmp_path / "m", "untied", change=lambda tensors: tensors.pop("lm_head.weight"))
    sharded(folder, ["lm_head.weight"])
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks tensor lm_head\.weight"):
        logits(folder)


def test_another_tensor_that_no_file_holds_is_missing(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    sharded(folder, ["model.decoder.layers.0.fc9.weight"])
    with pytest.raises(CheckpointError, match=r"fc9\.weight' is missing from .*, where the index places it"):
        logits(folder)


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["tensors", "tensors with attributes", "parameters", "parameters with attributes"])
def test_attributes_of_tensors_in_a_bin_file_are_not_read(tmp_path, kind):
    torch = pytest.importorskip("torch")
    folder = write_checkpoint(tmp_path / "m")
    expected = logits(folder)
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        tensor = torch.from_numpy(value)
        tensors[name] = torch.nn.Parameter(tensor) if kind.startswith("parameters") else tensor
        if kind.endswith("attributes"):
            tensors[name].partition = {"dim": 0, "stride": 1.5, "names": ["a", None], "is_parallel": True}
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    loaded = torch.load(folder / "pytorch_model.bin", weights_only=True)
    assert loaded.keys() == tensors.keys()
    np.testing.assert_array_equal(logits(folder), expected)
