"""The script as its users run it, on a shape that takes no time."""

import csv
from pathlib import Path

import pytest

from minillm.models import published
from tests.shapes import BASE


@pytest.mark.slow
def test_steps_and_prompts_have_their_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import gpu_host

    monkeypatch.setitem(published(), "tiny", {**BASE, "max_position_embeddings": 256})
    options = ["--shape", "tiny", "--sequences", "1,2", "--steps", "2", "--prompts", "20", "--out", str(tmp_path)]
    assert gpu_host.main(options) == 0
    lines = (tmp_path / "gpu_host.csv").read_text(encoding="utf-8").splitlines()
    *steps, prompt = csv.DictReader(line for line in lines if not line.startswith("#"))
    assert [(row["kind"], row["sequences"]) for row in steps] == [
        (kind, batch) for kind in gpu_host.KINDS for batch in ("1", "2")
    ]
    assert prompt["kind"] == "prompt of 20"
    assert 0 < float(prompt["us_per_launch"]) < float(prompt["host_us"])
