"""The defaults that a checkpoint brings along, in its generation_config.json."""

import json
import logging
from pathlib import Path

import pytest

from minillm.decoding.parameters import GenerationConfig
from minillm.decoding.resolving import resolve
from minillm.errors import CheckpointError
from minillm.loading import read_generation_config


def write(folder: Path, text: str | bytes) -> Path:
    (folder / "generation_config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_reading_the_defaults_of_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_generation_config(tmp_path) == {}
    stored = {"_from_model_config": True, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "typical_p": 1.0}
    assert read_generation_config(write(tmp_path, json.dumps(stored))) == stored
    assert not caplog.records


def test_what_is_not_done_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = {"temperature": 0.6, "max_time": 0.5, "constraints": [], "guidance_scale": 2, "zzz": 1}
    defaults = read_generation_config(write(tmp_path, json.dumps(stored)))
    resolve(GenerationConfig(), defaults, vocab_size=100, eos_token_id=2)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("minillm", logging.WARNING)
    assert "max_time, guidance_scale, zzz;" in record.getMessage()


@pytest.mark.parametrize("text", ["", "{", "[1]", b"\xff\xfe{}"], ids=["empty", "cut off", "a list", "not UTF-8"])
def test_an_unreadable_file_is_named(text: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: expected a JSON"):
        read_generation_config(write(tmp_path, text))


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_generation_config(tmp_path)
