"""The script as its users run it, on a shape that takes no time."""

import csv
from pathlib import Path

import pytest


@pytest.mark.longer
def test_every_kind_of_request_has_its_time(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import host_work

    options = ["--shape", tiny, "--sequences", "1,3", "--prompt-length", "5", "--steps", "2", "--rounds", "1"]
    assert host_work.main([*options, "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "host_work_tiny.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["kind"] for row in rows] == [name for name in host_work.KINDS if not name.startswith("guided")]
    assert all(0 < float(row[column]) < float("inf") for row in rows for column in ("ms_of_1", "ms_of_3"))
    assert "threads used: 1" in capsys.readouterr().out


def test_what_cannot_be_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import host_work

    assert host_work.main(["--shape", "opt-9b", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("host_work: ")
