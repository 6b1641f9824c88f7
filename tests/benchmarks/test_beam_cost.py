"""The script as its users run it, on a shape that takes no time."""

import csv
from pathlib import Path

import pytest


def run(*arguments: object) -> int:
    import beam_cost

    code: int = beam_cost.main([str(argument) for argument in arguments])
    return code


def test_table_csv_and_conclusion(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--shape", tiny, "--contexts", "9,5", "--beams", 3, "--steps", 4, "--threads", 1, "--out", tmp_path)
    assert run(*arguments) == 0
    out = capsys.readouterr().out
    assert "threads used: 1" in out
    assert "times a greedy step at most; 1.25 is aimed at" in out
    lines = (tmp_path / "beam_cost_tiny.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["context"] for row in rows] == ["5", "9"]
    for row in rows:
        assert 0 < float(row["beam_ms_min"]) <= float(row["beam_ms_median"]) <= float(row["beam_ms_max"])
        assert float(row["ratio_quartile_1"]) <= float(row["ratio_median"]) <= float(row["ratio_quartile_3"])


def test_what_cannot_be_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--shape", "opt-9b", "--steps", 1) == 2
    error = capsys.readouterr().err
    assert error.startswith("beam_cost: ")
    assert error.count("\n") == 1
