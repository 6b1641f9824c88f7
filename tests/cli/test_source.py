"""minillm source: the terms of the glossary are found where it says, and what is printed is there."""

import json
import re
from pathlib import Path

import pytest

from minillm.cli.main import run
from minillm.cli.source import definitions, files_of, locate, read_glossary

ENTRIES = read_glossary()


@pytest.mark.longer
def test_every_name_in_the_glossary_is_defined_in_its_file() -> None:
    missing = []
    for entry in ENTRIES:
        for pattern, names in entry.files:
            paths = files_of(pattern)  # which are there
            defined = [name for path in paths for name, _ in definitions(path)] if names else []
            words = " ".join(defined) if "*" in pattern else defined  # of many files a part of a name is meant
            lacking = [name for name in names if name not in words]
            missing += [(entry.terms, pattern, name) for name in lacking]
    assert not missing
    assert len(ENTRIES) > 100


@pytest.mark.slow
def test_a_line_that_is_printed_defines_the_name_beside_it() -> None:
    count = 0
    for entry in ENTRIES:
        for path, line, name in locate(entry, re.split("[,:;(]", entry.terms)[0]):
            text = path.read_text(encoding="utf-8", errors="replace").splitlines()[line - 1]
            assert not name or re.search(rf"\b(def|class) {name}\b|\b{name}\s*[:=]", text), (entry.terms, path, line)
            count += bool(name)
    assert count > 80


@pytest.mark.parametrize("word", ["top_p", "top-p", "TopP"])
def test_a_field_a_term_and_a_class_find_the_same(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["source", word]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sampling: temperature, top-k, top-p, min-p"
    [place] = [line for line in lines if line.endswith("keep_top_p")]
    path, line = re.search(r"(\S+reference/sampling_by_sorting\.py):(\d+)", place).groups()
    assert Path(path).read_text().splitlines()[int(line) - 1].startswith("def keep_top_p(")


def test_several_words_are_one_term(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["source", "copy", "on", "write", "--json"]) == 0
    [place] = map(json.loads, capsys.readouterr().out.splitlines())
    assert (Path(place["path"]).name, place["name"]) == ("paged.py", "reserve")


def test_without_a_term_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["source"]) == 0
    assert capsys.readouterr().out.splitlines() == [entry.terms for entry in ENTRIES]


def test_an_unknown_term_is_answered_with_one_like_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["source", "greedy serch"]) == 2
    assert "did you mean greedy search" in capsys.readouterr().err
