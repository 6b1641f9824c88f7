"""The script as its users run it, on a shape that takes no time."""

import csv
from pathlib import Path

import pytest

from minillm.models import published

from ..encoders import CONFIGS


def run(*arguments: object) -> int:
    import encoders

    code: int = encoders.main([str(argument) for argument in arguments])
    return code


@pytest.mark.reference
def test_table_and_csv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("ctranslate2", "torch", "transformers"):
        pytest.importorskip(package)
    monkeypatch.setitem(published(), "tiny", CONFIGS["bert"])
    arguments = ("--texts", "1,2", "--tokens", 5, "--rounds", 2, "--threads", 1, "--out", tmp_path)
    assert run("--shape", "tiny", *arguments) == 0
    assert "1.2 x is aimed at" in capsys.readouterr().out
    lines = (tmp_path / "encoders_tiny.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [(row["dtype"], row["texts"]) for row in rows] == [
        *(("float32", "1"), ("float32", "2"), ("int8", "1"), ("int8", "2"))
    ]
    for row in rows:
        assert 0 <= float(row["minillm_ms_min"]) <= float(row["minillm_ms_median"]) <= float(row["minillm_ms_max"])


@pytest.mark.reference
def test_a_corpus_beside_sentence_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import corpus

    pytest.importorskip("sentence_transformers")
    monkeypatch.setitem(published(), "tiny", CONFIGS["bert"])
    arguments = ("--shape", "tiny", "--texts", "20", "--rounds", "2", "--threads", "1", "--out", str(tmp_path))
    assert corpus.main([*arguments]) == 0
    assert "int8: " in capsys.readouterr().out
    lines = (tmp_path / "corpus_tiny.csv").read_text(encoding="utf-8").splitlines()
    rows = {row["side"]: row for row in csv.DictReader(line for line in lines if not line.startswith("#"))}
    assert [*rows] == ["float32", "int8", "sentence-transformers"]
    assert float(rows["float32"]["cosine"]) > 0.9999
    assert float(rows["int8"]["cosine"]) > 0.99


def test_what_cannot_be_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for shape, message in (("opt-125m", "BERT's shapes alone"), ("bert-9b", "is not known")):
        assert run("--shape", shape) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("encoders: ")
        assert error.count("\n") == 1
