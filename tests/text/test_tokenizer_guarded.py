"""Tokenizer files at which the tokenizers library panics or ends the process: each is one line, and nothing ends."""

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minillm.errors import CheckpointError
from minillm.text.tokenizer import Tokenizer
from minillm.text.tokenizer.guarded import call

from ..tiny import TOKENIZER
from ..tokenizing import folder_with

WHOLE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}


def bpe(**fields: Any) -> dict[str, Any]:
    return {"model": WHOLE["model"] | fields}


def added(token_id: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"added_tokens": [{"id": token_id, "content": "<x>", **flags}]}


def replace(*steps: tuple[dict[str, str], str]) -> dict[str, Any]:
    found = [{"type": "Replace", "pattern": pattern, "content": content} for pattern, content in steps]
    return {"normalizer": {"type": "Sequence", "normalizers": found}}


def unicode_rules(data: bytes) -> dict[str, Any]:
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}}


def template(**fields: Any) -> dict[str, Any]:
    first = {"SpecialToken": {"id": "z", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    given = {"type": "TemplateProcessing", "single": [first, text], "pair": [text], "special_tokens": {}}
    return {"post_processor": given | fields}


GROWING = ({"String": "a"}, "a" * 10)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an id of a table of gigabytes": (bpe(vocab={"a": 0, "b": 2**31, "ab": 2}), "a whole number from 0; for 3 tokens"),
    "an id beyond 32 bits": (bpe(vocab={"a": 0, "b": 2**32, "ab": 2}), "a whole number from 0"),
    "an added id of gigabytes": (added(2**32 - 1), "a whole number from 0; for 4 tokens"),
    "an added id below 0": (added(-1), "a whole number from 0"),
    "an added id that is none": (added("3"), "found '3'"),
    "rules that multiply": (replace(*[GROWING] * 9), r"its normalizer make a text up to 1e\+09 times longer"),
    "an expression that multiplies": (replace(({"Regex": "."}, "a" * 99)), "make a text up to 100 times longer"),
    "rules that decode into more": ({"decoder": replace(*[GROWING] * 9)["normalizer"]}, "decoder|tokenizer"),
    "Unicode rules that are none": (unicode_rules(b""), "not a table of Unicode rules"),
    "Unicode rules beyond their end": (unicode_rules(b"\xff\xff\xff\xff\xff"), "not a table of Unicode rules"),
    "Unicode rules that multiply": (unicode_rules(b"\4\0\0\0abcd" + b"x" * 999), "a text up to 250 times longer"),
    "a template's id": (
        template(special_tokens={"z": {"id": "z", "ids": [2**32 - 1], "tokens": ["z"]}}),
        "post_processor should map each token",
    ),
    "no model": ({"model": None}, "not a valid tokenizer file"),
    "no vocabulary": (bpe(vocab=3), "not a valid tokenizer file"),
    "a panic while it is read": (bpe(continuing_subword_prefix="abc"), "not a valid tokenizer file: .*out of range"),
    "no expression": (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
        "not a valid tokenizer file: .*parenthesis",
    ),
    "a sequence without an end": ({"normalizer": {"type": "Sequence", "normalizers": 3}}, "not a valid tokenizer file"),
}


def write(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(WHOLE | fields))
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_end_the_process_is_refused(name: str, tmp_path: Path) -> None:
    fields, words = REFUSED[name]
    with pytest.raises(CheckpointError, match=words) as raised:
        Tokenizer.from_folder(write(tmp_path, fields))
    assert "\n" not in str(raised.value)
    assert str(tmp_path) in str(raised.value)


PANICS: dict[str, tuple[dict[str, Any], str]] = {
    "a template without its token": (template(), "encode"),
    "a template of two texts": (template(single=[{"Sequence": {"id": "B", "type_id": 0}}]), "encode"),
    "Unicode rules beyond their table": (unicode_rules(b"\4\0\0\0\xff\xff\xff\x3f"), "encode"),
    "an expression that backtracks": (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$b"}, "behavior": "Isolated", "invert": False}},
        "encode",
    ),
    "parts of no length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "encode"),
    "stripping more than there is": ({"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 5}}, "decode"),
    "no unknown token": ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "z"}}, "encode"),
}


@pytest.mark.parametrize("name", PANICS)
def test_a_panic_while_it_is_used_is_one_line(name: str, tmp_path: Path) -> None:
    fields, method = PANICS[name]
    with pytest.raises(CheckpointError, match="the tokenizer cannot be used") as raised:
        tokenizer = Tokenizer.from_folder(write(tmp_path, fields))
        if method == "encode":
            tokenizer.encode("a" * 40)
        else:
            stream = tokenizer.stream()
            print([stream.push(token_id) for token_id in (0, 1, 0)], tokenizer.decode([0, 1]))
    assert "\n" not in str(raised.value)


def test_padding_and_truncation_are_no_concern(tmp_path: Path) -> None:
    fields = {
        "padding": {
            "strategy": {"Fixed": 2**40},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        },
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
    }
    assert Tokenizer.from_folder(write(tmp_path, fields)).encode("abab") == [2, 2]


def test_many_steps_that_keep_the_length_are_fine(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, replace(*[({"String": "a"}, "b")] * 99)))
    assert tokenizer.encode("ab") == [1, 1]


def test_gaps_between_ids_are_fine(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, bpe(vocab={"a": 0, "b": 100_000, "ab": 2})))
    assert tokenizer.vocab_size == 100_001
    assert tokenizer.encode("ba") == [100_000, 0]


@pytest.mark.parametrize("fatal", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_is_not_taken_for_a_panic(fatal: type[BaseException]) -> None:
    def interrupted() -> None:
        raise fatal

    with pytest.raises(fatal):
        call("here", interrupted)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "further tokens that are a number": ({"tokenizer_config": {"extra_special_tokens": 5}}, "should be a list"),
    "further tokens that are no texts": ({"tokenizer_config": {"extra_special_tokens": [5]}}, "should be text"),
    "a token of any length": ({"tokenizer_config": {"bos_token": {"content": ["x" * 9999]}}}, "should be text"),
    "an infinite id": ({"tokenizer_config": {"added_tokens_decoder": {"1e999": "x"}}}, "table of ids and tokens"),
    "an id of 5,000 digits": ({"tokenizer_config": {"added_tokens_decoder": {"9" * 5000: "x"}}}, "ids and tokens"),
    "an id that is infinite": ({"added_tokens": {"x": 10**400}}, "cannot have id"),
    "an id that is a list": ({"added_tokens": {"x": [1]}}, "table of ids and tokens"),
    "a token that is none": ({"tokenizer_config": {"added_tokens_decoder": {"512": None}}}, "should be text"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_other_kinds_are_one_line(name: str, tmp_path: Path) -> None:
    objects, words = SETTINGS[name]
    folder = folder_with(tmp_path, TOKENIZER, "vocab.json", "merges.txt", **objects)
    with pytest.raises(CheckpointError, match=words) as raised:
        Tokenizer.from_folder(folder)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < len(str(tmp_path)) + 700


@pytest.mark.parametrize("token_id", [2**32, 2**64, -1, 1e300, [2**40], [], True, "2"], ids=str)
def test_ids_in_config_json_that_no_token_has_are_nobodys(token_id: Any, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, TOKENIZER, "vocab.json", "merges.txt", config={"eos_token_id": token_id})
    assert Tokenizer.from_folder(folder).eos_token_id is None


def test_ids_of_gigabytes_in_vocab_json(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, TOKENIZER, "vocab.json", "merges.txt")
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    (folder / "vocab.json").write_text(json.dumps(vocab | {"zzz": 2**31}), encoding="utf-8")
    code = (
        "import sys, pathlib, minillm.text.tokenizer as t; t.Tokenizer.from_folder(pathlib.Path(sys.argv[1])).to_json()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert "a whole number from 0; for 513 tokens below" in done.stderr.splitlines()[-1]
