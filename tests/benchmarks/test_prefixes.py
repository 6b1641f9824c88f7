"""The script as its users run it, on a short prompt."""

import csv
from pathlib import Path

import pytest


def test_a_row_for_each_way_and_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import prefixes

    monkeypatch.setattr(
        prefixes, "LLAMA", prefixes.LLAMA | {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 96}
    )

    arguments = ["--length", "140", "--repeat", "1", "--threads", "1", "--out", str(tmp_path)]
    assert prefixes.main(arguments) == 0
    assert "tokens: the same in every way" in capsys.readouterr().out
    lines = (tmp_path / "prefixes.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["way"] for row in rows] == ["computed", "from a file", "from a store"]
    assert rows[0]["ratio"] == "1.0000" and all(row["tokens"] == "140" for row in rows)
