"""What beside config.json and the weights lies in a folder, and may not be passed over."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.errors import UnsupportedModelError
from minillm.models import load_model

from ..tiny import write_checkpoint


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    """transformers would add it to the weights."""
    folder = write_checkpoint(tmp_path / "model")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    for gone in ((), ("config.json", "model.safetensors")):
        for name in gone:
            (folder / name).unlink()
        with pytest.raises(UnsupportedModelError, match=r"holds an adapter \(adapter_config.json\).*merge it"):
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
