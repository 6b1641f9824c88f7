"""The script as its users run it, on a shape that takes no time."""

import csv
from pathlib import Path

import pytest


def run(*arguments: object) -> int:
    import stalls

    code: int = stalls.main([str(argument) for argument in arguments])
    return code


def test_a_row_for_each_budget(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--streams", 2, "--prompts", 2, "--length", 40, "--repeat", 1, "--beside", 50)
    assert run("--shape", tiny, "--budgets", "30,9", *few, "--out", tmp_path) == 0
    assert "threads used: 1" in capsys.readouterr().out
    lines = (tmp_path / "stalls_tiny.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["budget"] for row in rows] == ["9", "30"]
    for row in rows:
        assert float(row["between_tokens_ms_p50"]) <= float(row["between_tokens_ms_p99"])
        assert float(row["first_token_s_mean"]) <= float(row["first_token_s_last"])
        assert float(row["prompt_tokens_per_s"]) < float(row["tokens_per_s"])


def test_a_row_for_each_length_beside_which_a_short_prompt_comes_in(tiny: str, tmp_path: Path) -> None:
    few = ("--streams", 1, "--prompts", 1, "--length", 9, "--repeat", 1, "--budgets", 9)
    assert run("--shape", tiny, *few, "--beside", "20,60", "--out", tmp_path) == 0
    lines = (tmp_path / "stalls_beside_tiny.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["long_tokens"] for row in rows] == ["20", "60"]
    for row in rows:
        assert row["first_token_steps"] == "2"
        assert float(row["long_step_s"]) < float(row["first_token_s"])


def test_percentiles_are_values_that_were_measured() -> None:
    from stalls import percentile

    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_what_cannot_be_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--shape", "opt-9b") == 2
    error = capsys.readouterr().err
    assert error.startswith("stalls: ")
    assert error.count("\n") == 1
