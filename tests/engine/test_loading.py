"""A checkpoint's defaults in generation_config.json, its tokenizer, if any, and the backend that is chosen."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cpu import compiling
from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.numpy import NumpyBackend
from minillm.backends.placement import Placement, choose_backend
from minillm.decoding.resolving import resolve
from minillm.decoding.settings import GenerationConfig
from minillm.engine.loading import DEMO_MODEL
from minillm.errors import CheckpointError, DeviceError, ModelNotFoundError, ParameterError, PromptError
from minillm.formats import open_model
from minillm.measure.accounting.hardware import CHIPS
from minillm.measure.profiling import profile
from minillm.text.tokenizer import Tokenizer

from ..comparing import assert_same_results
from ..conversations import TEMPLATES
from ..tiny import write_checkpoint


def write(folder: Path, text: str | bytes) -> Path:
    (folder / "generation_config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_reading_the_defaults_of_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_model(tmp_path).generation_defaults() == {}
    stored = {"_from_model_config": True, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "typical_p": 1.0}
    assert open_model(write(tmp_path, json.dumps(stored))).generation_defaults() == stored
    assert not caplog.records


def test_what_is_not_done_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = {"temperature": 0.6, "max_time": 0.5, "constraints": [], "remove_invalid_values": True, "zzz": 1}
    defaults = open_model(write(tmp_path, json.dumps(stored))).generation_defaults()
    resolve(GenerationConfig(), defaults, vocab_size=100, eos_token_id=2)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("minillm", logging.WARNING)
    assert "max_time, remove_invalid_values, zzz;" in record.getMessage()


@pytest.mark.parametrize("text", ["", "{", "[1]", b"\xff\xfe{}"], ids=["empty", "cut off", "a list", "not UTF-8"])
def test_an_unreadable_file_is_named(text: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: expected a JSON"):
        open_model(write(tmp_path, text)).generation_defaults()


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        open_model(tmp_path).generation_defaults()


# --- tokenizers -------------------------------------------------------------------------------------------------------

TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")


@pytest.fixture
def bare(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint without its tokenizer."""
    return Path(shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns(*TOKENIZER_FILES)))


def test_a_folder_without_a_tokenizer_takes_token_ids(bare: Path, checkpoint: Path) -> None:
    with Engine(bare) as engine, Engine(checkpoint) as whole:
        assert engine.tokenizer is None
        made, expected = (one.generate([5, 6, 7], max_new_tokens=5) for one in (engine, whole))
        assert (made.token_ids, made.text) == (expected.token_ids, "")
        assert [t for event in engine.stream([5, 6, 7], max_new_tokens=5) for t in event.token_ids] == made.token_ids
        np.testing.assert_allclose(engine.forward([5, 6, 7]), whole.forward([5, 6, 7]), rtol=1e-4, atol=1e-4)
        assert_same_results(engine.score([5, 6, 7]), whole.score([5, 6, 7]))
        assert profile(engine, [[5, 6, 7]], hardware=CHIPS["h100"], max_new_tokens=2).steps


def test_text_is_refused_where_there_is_no_tokenizer(bare: Path) -> None:
    shutil.copyfile(TEMPLATES / "chatml.jinja", bare / "chat_template.jinja")
    talk = [{"role": "user", "content": "a"}]
    with Engine(bare) as engine:
        assert "a" in engine.render_chat(talk)
        calls = (engine.generate, engine.stream, engine.add, engine.forward, engine.score)
        for call, given in [*((call, "text") for call in calls), (engine.chat, talk), (engine.stream_chat, talk)]:
            with pytest.raises(
                PromptError,
                match=r"^this model has no tokenizer: give the prompt as token ids, or name a tokenizer by "
                r"Engine\(tokenizer=\.\.\.\), such as a folder with tokenizer\.json, else a SentencePiece model, "
                r"else vocab\.json with merges\.txt, else vocab\.txt$",
            ):
                call(given)
        assert not engine.busy


@pytest.mark.parametrize(("name", "content"), [("tokenizer.json", "{"), ("vocab.json", "{}"), ("tokenizer.model", "")])
def test_a_broken_tokenizer_stays_an_error(bare: Path, name: str, content: str) -> None:
    (bare / name).write_text(content, encoding="utf-8")
    with pytest.raises((CheckpointError, DeviceError, ModelNotFoundError)):
        Engine(bare)


@pytest.mark.parametrize("kind", ["folder", "file", "text", "object"])
def test_a_tokenizer_of_ones_own(bare: Path, checkpoint: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in TOKENIZER_FILES:
        shutil.copyfile(checkpoint / name, folder / name)
    if kind == "file":
        made = Tokenizer.from_folder(checkpoint).to_json()
        (folder / "other.json").write_text(made, encoding="utf-8")
    shutil.copyfile(TEMPLATES / "chatml.jinja", folder / "chat_template.jinja")
    given = {
        "folder": folder, "file": folder / "other.json", "text": str(folder), "object": Tokenizer.from_folder(folder)
    }[kind]  # fmt: skip
    fields: dict[str, Any] = {"max_new_tokens": 6, "stop_strings": ["no such text"]}
    with Engine(bare, tokenizer=given) as engine, Engine(checkpoint) as whole:
        made = engine.generate("red, green", **fields)
        assert_same_results(made, whole.generate("red, green", **fields))
        assert "".join(event.text for event in engine.stream("red, green", **fields)) == made.text
        assert engine.score("red").token_ids == whole.score("red").token_ids
        assert (engine.chat_template is None) == (kind == "object")


def test_a_tokenizer_in_place_of_the_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    """Here one with a vocabulary in reverse: text is other ids, and the same text comes back of them."""
    shutil.copytree(checkpoint, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    vocab = json.loads((checkpoint / "vocab.json").read_text(encoding="utf-8"))
    turned = dict(zip(vocab, reversed(vocab.values()), strict=True))
    (tmp_path / "other" / "vocab.json").write_text(json.dumps(turned), encoding="utf-8")
    with Engine(checkpoint) as own, Engine(checkpoint, tokenizer=tmp_path / "other") as other:
        ids, others = own.score("red, green").token_ids, other.score("red, green").token_ids
        assert ids != others
        assert own.tokenizer.decode(ids) == other.tokenizer.decode(others) == "red, green"


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "small", vocab_size=300)
    with pytest.raises(ParameterError, match="the tokenizer has ids up to 2047, and the model takes 300 tokens"):
        Engine(folder, tokenizer=DEMO_MODEL)
    for path, error, message in (
        (tmp_path / "nowhere", ModelNotFoundError, "there is no folder"),
        (tmp_path, ModelNotFoundError, "holds no tokenizer: looked for tokenizer.json"),
        (folder / "config.json", CheckpointError, r"config\.json is not a valid tokenizer file"),
    ):
        with pytest.raises(error, match=message):
            Engine(folder, tokenizer=path)


def test_rows_beyond_the_vocabulary_decode_to_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """The tokenizer learns how many rows the model has, which its own folder does not say."""
    folder = write_checkpoint(tmp_path / "padded", vocab_size=520)
    with Engine(folder, tokenizer=checkpoint) as engine:
        assert engine.tokenizer.decode([515]) == ""
        assert Tokenizer.from_folder(checkpoint).for_model(520).decode([515]) == ""


# --- the backend ------------------------------------------------------------------------------------------------------


def test_kernels_in_c_are_the_default(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("MINILLM_BACKEND", raising=False)
    assert isinstance(choose_backend(Placement(), 1), CpuBackend)
    assert not caplog.records


def test_without_a_compiler_numpy_is_the_default_and_one_line_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.delenv("MINILLM_BACKEND", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(compiling, "_load", compiling._load.__wrapped__)
    assert isinstance(choose_backend(Placement(), 1), NumpyBackend)
    [message] = caplog.messages
    assert message.startswith("the C kernels need a C compiler: found neither CC nor cc, gcc, clang; install gcc")
    assert message.endswith("pip install ziglang; minillm computes with NumPy, which is slower")
    with pytest.raises(DeviceError, match="need a C compiler"):
        compiling.load()


def test_the_environment_names_another_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MINILLM_BACKEND", "numpy")
    assert isinstance(choose_backend(Placement(), 1), NumpyBackend)
    assert isinstance(choose_backend(Placement(backend="cpu"), 1), CpuBackend)
    monkeypatch.setenv("MINILLM_BACKEND", "numba")
    with pytest.raises(DeviceError, match=r"^MINILLM_BACKEND 'numba' is not known: expected 'cpu', 'numpy'$"):
        choose_backend(Placement(), 1)
    assert not caplog.records
