"""Files of a checkpoint that are missing, too large or malformed JSON: one line each."""

import json
import os
import socket
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.errors import CheckpointError, MinillmError
from minillm.files import LIMITS, OTHER_LIMIT, read_bytes, read_json
from minillm.formats import SMALL_FILES
from minillm.formats.folder import TOOL_USE

from .tiny import write_checkpoint

WEIGHTS = {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"}
NAMES = sorted(name for name in SMALL_FILES | WEIGHTS if not name[0].isdigit())  # modules are read if there are some

TOKENIZERS = {
    "sentencepiece.bpe.model": "MBartTokenizer",
    "spiece.model": "PegasusTokenizer",
    "spm.model": "DebertaV2Tokenizer",
}
"""File of SentencePiece -> a class that reads it"""


def a_socket(path: Path) -> None:
    here = os.getcwd()  # noqa: PTH109 - the name of a socket has at most 108 bytes, so it is made from beside it
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a link to a pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe"))[1],
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /dev/tty": lambda path: path.symlink_to("/dev/tty"),
    "a folder": Path.mkdir,
    "a socket": a_socket,
}


def folder_for(folder: Path, name: str) -> Path:
    """A checkpoint in which the file of that name is looked at, and is missing."""
    write_checkpoint(folder)
    if name in ("tokenizer.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"):
        (folder / "tokenizer_config.json").unlink()  # which would have the last word
    for file, kind in TOKENIZERS.items():
        if name == file:
            (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    if name == "vocab.txt":
        (folder / "vocab.json").unlink()
        (folder / "merges.txt").unlink()
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    if name.startswith("sentence_") or name == "config_sentence_transformers.json":
        modules = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    if name in WEIGHTS:
        (folder / "model.safetensors").unlink()
    if name == TOOL_USE:  # beside the other template
        (folder / "chat_template.jinja").write_text("")
        (folder / name).parent.mkdir()
    (folder / name).unlink(missing_ok=True)
    return folder


def some(first: str, kinds: Iterable[str], names: list[str]) -> list[Any]:
    """Every file with every kind of content: of the first kind in the quick tests, and config.json of each."""
    quick = {(name, kind) for name in names for kind in kinds if kind == first or name == "config.json"}
    return [
        pytest.param(name, kind, marks=() if (name, kind) in quick else pytest.mark.exhaustive)
        for name in names
        for kind in kinds
    ]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "kind"), some("a pipe", SPECIAL, NAMES))
def test_what_is_no_regular_file_is_refused_at_once(name: str, kind: str, tmp_path: Path) -> None:
    folder = folder_for(tmp_path / "model", name)
    SPECIAL[kind](folder / name)
    with pytest.raises(MinillmError) as raised, Engine(folder):
        pass
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted({*LIMITS, "config.json", "model.safetensors.index.json"}))
def test_a_file_is_as_large_as_its_kind_can_be(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    limit = LIMITS.get(name, 64 * 2**20 if name.endswith(".index.json") else OTHER_LIMIT)
    path.touch()
    os.truncate(path, limit + 1)
    with pytest.raises(CheckpointError, match=rf"{name} is larger than {limit // 2**20} MiB"):
        read_bytes(path)
    os.truncate(path, 100)
    assert read_bytes(path) == bytes(100)


def test_the_limit_holds_where_the_system_tells_no_size() -> None:
    """Files of /proc are regular and say that they have no bytes."""
    path = Path("/proc/self/status")
    if not path.exists():
        pytest.skip("no such file on this system")
    assert stat.S_ISREG(path.stat().st_mode)
    assert path.stat().st_size == 0
    assert read_bytes(path).startswith(b"Name:")


BAD_JSON = {
    "empty": ("", "expected a JSON text"),
    "a byte order mark": ("\ufeff{}", "expected a JSON text"),
    "deep lists": ('{"a":' * 500 + "1" + "}" * 500, "nested too deeply"),
    "very deep lists": ("[" * 200_000, "nested too deeply"),
    "a number of 5,000 digits": ('{"a": ' + "9" * 5000 + "}", "expected a JSON text"),
    "NaN": ('{"a": NaN}', "the number NaN"),
    "infinity": ('{"a": [-Infinity]}', "the number -Infinity"),
    "half a pair": (r'{"a": "\ud800"}', "half a surrogate pair"),
    "half a pair in a key": (r'{"\uDFFF": 1}', "half a surrogate pair"),
    "a list": ("[]", "expected a JSON object, found list"),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_json_of_all_kinds_is_one_line(case: str, tmp_path: Path) -> None:
    text, words = BAD_JSON[case]
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=words) as raised:
        read_json(tmp_path / "x.json")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < len(str(tmp_path)) + 300


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "case"), some("NaN", BAD_JSON, [name for name in NAMES if name.endswith(".json")]))
def test_every_json_file_goes_through_it(name: str, case: str, tmp_path: Path) -> None:
    folder = folder_for(tmp_path / "model", name)
    (folder / name).write_text(BAD_JSON[case][0], encoding="utf-8")
    with pytest.raises(MinillmError) as raised, Engine(folder):
        pass
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_pairs_of_surrogates_are_characters(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"\U0001f600": "\U0001f600"}))
    assert read_json(tmp_path / "x.json") == {"\U0001f600": "\U0001f600"}
