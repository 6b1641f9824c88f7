"""Tables and lists of the commands in narrow terminals, and tokens that are bytes."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from minillm import Engine
from minillm.cli.main import run
from minillm.cli.output import Table, columns_of, flow, quoted
from minillm.engine.loading import DEMO_MODEL
from minillm.measure.accounting.hardware import Hardware
from minillm.models import published
from minillm.text.tokenizer import Tokenizer

from ..shapes import BASE

PROMPT = ["--prompt", "A list of é日本: red,"]
ONCE = ["--prompt", "Once upon a time", "--max-new-tokens", "6"]
COMMANDS = {
    "analyze": ["opt-13b", "--tensor-parallel", "2", "--pipeline-parallel", "2"],
    "profile": ["--shape", "small", "--prompt-length", "3", "--new-tokens", "2", "--repeat", "1", "--backend", "numpy"],
    "perplexity": ["--backend", "numpy", "--shape", "small", "--dtype", "float32,int4"],
    "inspect": PROMPT,
    "tokenize": PROMPT,
    "compare": ONCE,
    "models": [str(DEMO_MODEL.parent), "--hardware", "a100"],
    "bench": [],
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small shape, a machine that need not be probed, and an empty cache of the hub."""
    monkeypatch.setitem(published(), "small", BASE)
    machine = Hardware(name="this machine", rates={"float32": 1e11}, bandwidth=2e10, memory=1, source="none")
    monkeypatch.setattr("minillm.measure.profiling.probe_with", lambda backend, threads: machine)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


def shown(command: str, width: int | None, capsys: Any) -> str:
    """The output of a command on a terminal of `width` columns, or into a pipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width or 300))  # a pipe has no width, whatever the variable says
        patch.setattr("sys.stdout.isatty", lambda: width is not None)
        assert run([command, *COMMANDS[command]]) == 0
    return str(capsys.readouterr().out)


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_wider_than_a_terminal(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    narrow = shown(command, 40, capsys)
    assert max(map(columns_of, narrow.splitlines())) <= 40
    if command in ("analyze", "inspect", "tokenize"):  # which say the same each time
        assert narrow.split() == shown(command, None, capsys).split(), "nothing is lost"


def test_statistics_fold_on_standard_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(["generate", *ONCE, "--stats"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 40
    assert "prompts     5 tokens, 0 found in the" in lines


def test_a_table_folds_at_the_same_places_in_each_row() -> None:
    table = Table(["name", "one", "two", "three"], [["a", "1", "22", "333"], ["bb", "4"], ["longer name", "", "", "5"]])
    whole = ["name         one  two  three", "a              1   22    333", "bb             4"]
    assert table.lines() == table.lines(28) == [*whole, "longer name                5"]
    below = ["name", "  one  two  three", "a", "    1   22    333", "bb", "    4", "longer name", "                5"]
    assert table.lines(27) == table.lines(17) == below
    assert table.lines(16)[:6] == ["name", "    one  two", "  three", "a", "      1   22", "    333"]
    other = Table(["a", "b" * 9, "c", "d" * 9], [["1", "2", "3", "4"]])
    assert other.lines(17) == ["a  bbbbbbbbb  c", "   ddddddddd", "1          2  3", "           4"]


def test_wide_characters_take_two_columns() -> None:
    table = Table(["name", "n"], [["日本", "1"], ["e\u0301", "22"]])
    assert table.lines() == ["name   n", "日本   1", "e\u0301     22"]
    assert flow("日本: ", ["red,", "green", "blue"], 14) == ["日本: red,", "      green", "      blue"]
    assert flow("longer: ", ["red,", "green"], 14) == ["longer:", "    red, green"]


def test_bytes_of_a_token_are_shown_as_bytes(tmp_path: Path) -> None:
    """Byte-level, and SentencePiece's byte tokens; a backslash that is text stays apart from them."""
    tokenizer = Engine().tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("é\\x\n", add_special_tokens=False)
    assert [quoted(tokenizer, i) for i in ids] == [r'"\xc3"', r'"\xa9"', r'"\\"', '"x"', r'"\n"']
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<0xE6>": 0, "<0x0A>": 1, "▁a": 2}, [], byte_fallback=True))
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    fallback = Tokenizer(backend, {})
    assert [fallback.token(i) for i in range(3)] == [r"\xe6", "\n", " a"]
    assert [quoted(fallback, i) for i in range(3)] == [r'"\xe6"', r'"\n"', '" a"']
