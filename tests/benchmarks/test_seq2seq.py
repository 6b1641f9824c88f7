"""The script as its users run it, on shapes that take no time."""

import csv
from pathlib import Path

import pytest

from minillm.models import published

from ..models.test_bart import CONFIG as BART
from ..models.test_t5 import CONFIG as T5

SMALL = {"t5-tiny": T5 | {"d_kv": 8}, "bart-tiny": BART | {"max_position_embeddings": 128}}


def run(*arguments: object) -> int:
    import seq2seq

    code: int = seq2seq.main([str(argument) for argument in arguments])
    return code


@pytest.mark.slow
def test_table_csv_and_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """In float32 both say the same; the conversion needs the reference extra."""
    for package in ("ctranslate2", "transformers", "torch"):
        pytest.importorskip(package, reason="CTranslate2's converter needs the reference extra")
    import peer_files
    import seq2seq

    for name, raw in SMALL.items():
        monkeypatch.setitem(published(), name, raw)

    def here(shape: str, folder: Path) -> None:
        """Not in another process, which would not know these shapes."""
        peer_files.write_checkpoint(shape, folder)
        peer_files.write_ctranslate2(folder)

    monkeypatch.setattr(seq2seq, "written", here)
    sizes = ("--source", 9, "--new", 6, "--batches", "1,3", "--beams", "1,2", "--turns", 2)
    assert run("--shapes", *SMALL, *sizes, "--out", tmp_path) == 0
    out = capsys.readouterr().out
    assert "threads used: 1" in out
    assert "times minillm's CPU time at least; 1.2 is aimed at" in out
    lines = (tmp_path / "seq2seq.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert len(rows) == 2 * 2 * 2 * 2
    for row in rows:
        assert 0 < float(row["minillm_s_min"]) <= float(row["minillm_s_median"]) <= float(row["minillm_s_max"])
        assert float(row["ratio_quartile_1"]) <= float(row["ratio_median"]) <= float(row["ratio_quartile_3"])
        if (row["dtype"], row["beams"]) == ("float32", "1"):
            assert float(row["same_tokens"]) == 1


def test_what_cannot_be_run_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for shape, message in (("opt-125m", "encoder-decoders are measured"), ("t5-tiny", "is not known")):
        assert run("--shapes", shape, "--out", tmp_path) == 2
        error = capsys.readouterr().err
        assert error.startswith("seq2seq: ") and message in error
        assert error.count("\n") == 1


def test_a_conversion_that_fails_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ctranslate2", reason="it is asked for first")
    monkeypatch.setitem(published(), "t5-tiny", SMALL["t5-tiny"])  # which the other process does not know
    assert run("--shapes", "t5-tiny", "--turns", 1, "--out", tmp_path) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("seq2seq: t5-tiny cannot be converted")
