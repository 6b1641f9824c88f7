"""The door to formats: what each of them says of the same model, and a format that comes from outside."""

import json
from pathlib import Path

import numpy as np
import pytest

from minillm import Engine
from minillm.errors import ModelNotFoundError
from minillm.formats import FORMATS, ModelFiles, find_model, open_checkpoint, open_model
from minillm.formats.write_checkpoint import write_checkpoint as quantise

from ..gguf_files import LLAMA, write_llama
from ..pages import block
from ..tiny import CONFIG, Held, write_checkpoint

PROMPT = [5, 17, 40]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The format of .npz files in minillm/formats/README.md, in place for a test."""
    code = block("minillm/formats/README.md", "python", "class Arrays(ModelFiles)")
    formats = [*FORMATS]
    exec(code, {"json": json, "np": np, "ModelFiles": ModelFiles, "FORMATS": formats, "Array": Held})
    monkeypatch.setattr("minillm.formats.load_model.FORMATS", formats)


def write_arrays(path: Path, source: Path) -> Path:
    _, tensors = open_model(source).weights()
    raw = (source / "config.json").read_text(encoding="utf-8")
    np.savez(path, **{name: tensor.load() for name, tensor in tensors.items()}, **{"config.json": np.array(raw)})
    return path


def test_a_file_of_no_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"model\.npz.* is not a folder"):
        find_model(write_arrays(tmp_path / "model.npz", write_checkpoint(tmp_path / "model")))


@pytest.mark.usefixtures("example")
def test_a_format_from_outside_is_one_class(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model")
    path = write_arrays(tmp_path / "model.npz", source)
    files = open_model(path)
    assert (files.config, files.description) == (open_model(source).config, "float32")
    files.check_complete()
    with Engine(path) as ours, Engine(source) as theirs:
        assert ours.tokenizer is None and ours.chat_template is None
        assert ours.stored.bytes == path.stat().st_size
        np.testing.assert_array_equal(ours.forward(PROMPT), theirs.forward(PROMPT))


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    files = open_model(tmp_path / "nowhere")
    assert files.tokenizer is None and files.chat_template is None
    with pytest.raises(ModelNotFoundError, match=r"nowhere holds no config\.json"):
        _ = files.config


def test_a_folder_says_what_is_in_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    quantise(folder, tmp_path / "small", "int4")
    files, small = open_model(folder), open_model(tmp_path / "small")
    assert (files.family, files.description, files.quantization, files.as_built) == ("opt", "float32", None, False)
    assert (small.family, small.description, small.kept_dtype, small.as_built) == ("opt", "int4", "int4", True)
    assert files.config == small.config and files.config.hidden_size == CONFIG["hidden_size"]
    assert files.weight_bytes > small.weight_bytes > 0
    assert files.weight_files == open_checkpoint(folder).files


def test_a_gguf_file_says_what_is_in_it(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf")
    files = open_model(tmp_path / "m.gguf")
    assert (files.format_name, files.family, files.as_built) == ("gguf", "llama", True)
    assert files.config.hidden_size == LLAMA["hidden_size"]
    assert files.weight_files == (tmp_path / "m.gguf",) and files.weight_bytes == (tmp_path / "m.gguf").stat().st_size
    assert files.description.startswith("GGUF ") and files.counts.total() > 0
    files.check_complete()
