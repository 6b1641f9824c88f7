"""The script on a small shape: every side runs, and the tables hold what was measured."""

import csv
import json
from pathlib import Path

import pytest

from .conftest import SMALL

pytest.importorskip("matplotlib", reason="plots need the plot extra")
pytest.importorskip("mpi4py", reason="ranks need the mpi extra")


def run(*arguments: object) -> int:
    import ranks

    code: int = ranks.main([str(argument) for argument in arguments])
    return code


@pytest.mark.slow
def test_every_side_and_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = SMALL | {"max_position_embeddings": 256}
    few = ("--steps", 2, "--repeat", 1, "--batches", "1,8", "--prompt-length", 128, "--ranks", 2)
    assert run("--shape", json.dumps(shape), "--name", "small", *few, "--threads", 2, "--out", tmp_path) == 0
    lines = (tmp_path / "ranks_small.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    sides = {row["side"] for row in rows}
    assert sides == {"one process", "one core", "tensor 2", "pipeline 2"}
    assert {row["case"] for row in rows} == {"decode, batch 1", "decode, batch 8", "decode, batch 16", "prefill"}
    assert all(0 < float(row["ms_min"]) <= float(row["ms_median"]) <= float(row["ms_max"]) for row in rows)
    text = capsys.readouterr().out
    assert "(S - 1) / (M + S - 1)" in text and "all-reduce, us" in text and "weak: batch 16" in text
    assert (tmp_path / "ranks_small.png").read_bytes().startswith(b"\x89PNG")


def test_parts_take_the_models_that_they_need() -> None:
    from ranks import parse, sides_of

    def names(*words: str) -> list[str]:
        return [name for name, *_ in sides_of(parse(words))]

    assert names("--parts", "steps", "--shape", "opt-1.3b") == ["one process", "tensor 2"]
    assert names("--parts", "stages") == ["one process", "pipeline 2"]
    assert names("--parts", "scaling") == ["one core", "tensor 2", "tensor 4"]
    assert names() == ["one process", "one core", "tensor 2", "tensor 4", "pipeline 2"]
    assert parse(("--parts", "scaling")).parts == ("links", "scaling")
    with pytest.raises(SystemExit):
        parse(("--parts", "steps,all"))


def test_an_all_reduce_by_the_model() -> None:
    from ranks import Link, link_of

    link = Link("", 1e-6, 1e9, "")
    assert link.all_reduce_seconds(1000, 1) == 0
    assert link.all_reduce_seconds(8, 2) == pytest.approx(1e-6 + 8e-9)  # one message
    assert link.all_reduce_seconds(1e9, 8) == pytest.approx(14 * (1e-6 + 1 / 8))  # 2 (N - 1) of an N-th
    found = link_of({1000: link.seconds(1000), 1_000_000: link.seconds(1e6)})
    assert found.bandwidth == pytest.approx(1e9)
