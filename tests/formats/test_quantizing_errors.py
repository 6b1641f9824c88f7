"""Errors in quantising a checkpoint and in loading a quantised one."""

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.errors import CheckpointError, ParameterError, UnsupportedModelError
from minillm.formats.safetensors import SafetensorsFile
from minillm.formats.write_checkpoint import write_checkpoint

from ..tiny import write_checkpoint as write_source


@pytest.mark.parametrize(
    ("dtype", "group", "message"),
    [
        ("int3", None, "dtype 'int3' is none to write weights in: expected one of int8, int4, bfloat16, float16"),
        ("float32", None, "dtype 'float32' is none to write weights in"),
        ("int4", 48, "a group should have 32 or 64 weights, found 48"),
        ("bfloat16", 32, "a group size has no effect on bfloat16: leave it out"),
    ],
)
def test_a_format_that_is_not_offered_is_named(tmp_path: Path, dtype: str, group: int | None, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        write_checkpoint(tmp_path / "never looked at", tmp_path / "out", dtype, group)
    assert list(tmp_path.iterdir()) == []


def test_a_quantised_checkpoint_is_not_rounded_once_more(tmp_path: Path) -> None:
    write_checkpoint(write_source(tmp_path / "source"), tmp_path / "out", "int4")
    with pytest.raises(ParameterError, match="is already quantised, to int4: quantise what it was made from"):
        write_checkpoint(tmp_path / "out", tmp_path / "twice", "int8")
    with pytest.raises(ParameterError, match="the checkpoint is already quantised to int4: dtype should be 'auto'"):
        Engine(tmp_path / "out", dtype="int8")
    with pytest.raises(ParameterError, match="exists already"):
        write_checkpoint(tmp_path / "source", tmp_path / "out", "int4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    Engine(tmp_path / "out", dtype="int4").close()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path / "source")
    write, left = SafetensorsFile.write, [12]

    def full(self: SafetensorsFile, *arguments: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, *arguments)

    monkeypatch.setattr(SafetensorsFile, "write", full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device; nothing of it was left"):
        write_checkpoint(source, tmp_path / "out", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("dtype", ["int8", "int4", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e9])
def test_a_weight_that_does_not_fit_is_refused(tmp_path: Path, dtype: str, value: float) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["layers.1.fc1.weight"][3, 4] = value

    source = write_source(tmp_path / "source", change=spoil)
    with pytest.raises(ParameterError, match=r"layers\.1\.fc1\.weight.*finite"):
        write_checkpoint(source, tmp_path / "out", dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"quant_method": "hqq", "bits": 4}, UnsupportedModelError, "the checkpoint is quantised by 'hqq'"),
        ({"bits": 4}, UnsupportedModelError, "the checkpoint is quantised by None"),
        ("awq", UnsupportedModelError, "the checkpoint is quantised by 'awq'"),
        ({"quant_method": "minillm", "bits": 3, "group_size": 32}, CheckpointError, "bits 8 or 4 .* found 3 and 32"),
        ({"quant_method": "minillm", "bits": 4}, CheckpointError, "bits 8 or 4 .* found 4 and None"),
    ],
)
def test_other_ways_to_quantise_are_named(tmp_path: Path, value: Any, error: type[Exception], message: str) -> None:
    source = write_source(tmp_path / "source")
    edit_config(source, quantization_config=value)
    with pytest.raises(error, match=message):
        Engine(source)
    with pytest.raises(error, match=message):
        write_checkpoint(source, tmp_path / "out", "int8")


def test_no_family_knows_it(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    edit_config(source, model_type="nobody's")
    with pytest.raises(UnsupportedModelError, match='model_type is "nobody\'s"'):
        write_checkpoint(source, tmp_path / "out", "int8")


def rewrite(folder: Path, change: dict[str, Any]) -> None:
    """The same tensors but for those in `change`; None leaves one out."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors") | change
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.zeros((40, 8), np.uint8)}, r"fc1\.weight should be uint8 of shape \[40, 16\]"),
        ({"weight": np.zeros((40, 16), np.float16)}, r"should be uint8 .* found float16 of shape \[40, 16\]"),
        ({"weight_scale": np.ones((40, 1), np.float32)}, r"fc1\.weight_scale should be float16"),
        ({"weight_scale": None}, r"fc1\.weight should have shape \[40, 32\] .* found \[40, 16\]"),
        ({"weight": None}, r"lacks tensor layers\.0\.fc1\.weight"),
        ({"bias_scale": np.ones(3, np.float16)}, "bias_scale, which its config.json leaves no place for"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_damaged_folder_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_checkpoint(write_source(tmp_path / "source"), tmp_path / "out", "int4")
    rewrite(tmp_path / "out", {f"layers.0.fc1.{name}": array for name, array in change.items()})
    with pytest.raises(CheckpointError, match=message):
        Engine(tmp_path / "out")


@pytest.mark.parametrize("dtype", ["auto", "float32", "int8"])
def test_integers_without_scales_are_no_weights(tmp_path: Path, dtype: str) -> None:
    source = write_source(tmp_path / "source")
    rewrite(source, {"model.decoder.layers.0.fc1.weight": np.ones((40, 32), np.int8)})
    for backend in ("numpy", "auto"):
        with pytest.raises(UnsupportedModelError, match=r"layers\.0\.fc1\.weight.* is stored as int8"):
            Engine(source, dtype=dtype, backend=backend)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.fc1\.weight is stored as int8"):
        write_checkpoint(source, tmp_path / "out", "int4")


def test_a_quantised_draft_beside_a_model_that_is_not(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    write_checkpoint(source, tmp_path / "draft", "int4")
    with Engine(source, draft=tmp_path / "draft") as engine, Engine(source) as plain:
        prompt, fields = [5, 6, 7], {"max_new_tokens": 12, "eos_token_id": []}
        assert engine.generate(prompt, **fields).token_ids == plain.generate(prompt, **fields).token_ids
