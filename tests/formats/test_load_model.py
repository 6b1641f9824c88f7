"""Other files in a model's folder that must not be ignored."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.load_model import load_model
from minillm.models import build_model

from ..tiny import write_checkpoint


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    """transformers would add it to the weights."""
    folder = write_checkpoint(tmp_path / "model")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    for gone in ((), ("config.json", "model.safetensors")):
        for name in gone:
            (folder / name).unlink()
        with pytest.raises(UnsupportedModelError, match=r"an adapter \(adapter_config.json\).* this folder as adapter"):
            load_model(folder, NumpyBackend())


def test_code_that_comes_along_is_not_run_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path / "model")
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    load_model(folder, NumpyBackend())
    assert not caplog.records
    (folder / "config.json").write_text(json.dumps(raw | {"auto_map": {"AutoModel": "modeling.X"}}), encoding="utf-8")
    load_model(folder, NumpyBackend())
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("minillm", logging.WARNING)
    assert "names code of its own (auto_map), which is not run: read as opt" in record.getMessage()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), r"model\.safetensors is shorter than when it was"),
        (lambda path: path.write_bytes(path.read_bytes() + bytes(8)), "was changed while it was read"),
        (lambda path: os.utime(path, ns=(1, 1)), "was changed while it was read"),
        (Path.unlink, r"model\.safetensors cannot be read"),
    ],
    ids=["cut short", "longer", "written again", "gone"],
)
def test_weights_that_change_while_they_are_loaded(
    change: Callable[[Path], object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "model")

    def changed_meanwhile(*args: Any, **options: Any) -> Any:
        model = build_model(*args, **options)
        change(folder / "model.safetensors")
        return model

    monkeypatch.setattr("minillm.formats.load_model.build_model", changed_meanwhile)
    with pytest.raises(CheckpointError, match=words):
        load_model(folder, NumpyBackend(weight_order="F"))  # which copies: nothing is mapped that could be cut short
