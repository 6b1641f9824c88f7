"""A special token that the vocabulary does not have is left out with a warning, whichever file names it."""

import json
import logging

import numpy as np
import pytest

from minillm import Engine
from minillm.errors import CheckpointError

from ..gguf_files import LLAMA, arrays, byte_tokens, write_llama
from ..tiny import write_checkpoint

PROMPT = [3, 77, 12, 150]


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING, "minillm")
    return lambda: [text.partition("left out: ")[2] for text in caplog.messages if "left out" in text]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("token_id", [320, 32_000, 2**32 - 1])
@pytest.mark.parametrize("role", ["bos", "eos", "eot", "eom", "padding", "unknown"])
def test_in_a_gguf_file(tmp_path, warned, role, token_id):
    write_llama(tmp_path / "plain.gguf")
    write_llama(tmp_path / "m.gguf", tokenizer={f"{role}_token_id": token_id})
    with Engine(tmp_path / "plain.gguf") as engine:
        expected = engine.forward(PROMPT)
    with Engine(tmp_path / "m.gguf") as engine:
        np.testing.assert_array_equal(engine.forward(PROMPT), expected)
        assert engine.config.eos_token_ids == ()
        assert engine.tokenizer.end_ids == ()
        [result] = engine.generate([PROMPT], max_new_tokens=20)
        assert len(result.completions[0].token_ids) == 20
    assert warned() == [f"{role}_token_id {token_id}"]


def test_sentencepieces_own_id_stands_for_a_wrong_one(tmp_path):
    """As in llama.cpp: "using default id"."""
    tokens = ["<unk>", "<s>", "</s>", "a", "b", *(f"<{i}>" for i in range(315))]
    scores = [-float(i) for i in range(320)]
    entries = {"model": "llama", "tokens": tokens, "scores": scores, "merges": None, "bos_token_id": 1}
    write_llama(tmp_path / "m.gguf", tokenizer=entries | {"eos_token_id": 99_999})
    with Engine(tmp_path / "m.gguf") as engine:
        assert engine.tokenizer.eos_token_id == 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("fields", "left_out"),
    [
        ({"eos_token_id": -1}, ["eos_token_id -1"]),
        ({"eos_token_id": 512}, ["eos_token_id 512"]),
        ({"eos_token_id": [7, 512, -1]}, ["eos_token_id 512, eos_token_id -1"]),
        ({"bos_token_id": -1, "pad_token_id": 9999}, ["bos_token_id -1, pad_token_id 9999"]),
        ({"eos_token_id": 7, "pad_token_id": 511}, []),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_in_the_files_of_a_folder(tmp_path, warned, file, fields, left_out):
    folder = write_checkpoint(tmp_path / "m")
    with Engine(folder) as engine:
        expected = engine.forward(PROMPT)
    stored = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(stored | fields))
    with Engine(folder) as engine:
        np.testing.assert_array_equal(engine.forward(PROMPT), expected)
        assert all(0 <= i < 512 for i in engine.config.eos_token_ids)
        engine.generate([PROMPT], max_new_tokens=3)
    assert warned() == left_out


def test_an_id_that_is_no_number_is_still_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | {"eos_token_id": "</s>"}))
    with pytest.raises(CheckpointError, match="eos_token_id should be token ids"):
        Engine(folder)


def test_a_byte_level_vocabulary_without_merges_is_refused(tmp_path):
    write_llama(tmp_path / "m.gguf", values=arrays(LLAMA), tokenizer={"tokens": byte_tokens(320), "merges": None})
    with pytest.raises(CheckpointError, match=r"without merges: tokenizer\.ggml\.merges is missing"):
        Engine(tmp_path / "m.gguf")
