"""The script as its users run it, on a short text."""

import csv
from pathlib import Path

import pytest


def test_a_row_for_each_format_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import long_context

    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(long_context, "LLAMA", long_context.LLAMA | small | {"vocab_size": 96})
    assert long_context.main(["--contexts", "9", "--tokens", "1", "--repeat", "2", "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "long_context.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["cache"] for row in rows if row["engine"] == "minillm"] == list(long_context.OURS)
    assert all(row["context"] == "9" and float(row["ms_min"]) > 0 for row in rows)
