"""The script as its users run it, on shapes that take no time."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.errors import install
from minillm.measure import accounting
from minillm.models import opt, tensor_shapes

from ..shapes import BASE
from .conftest import SCRIPTS

pytest.importorskip("matplotlib", reason="the plot needs the plot extra")


def run(*arguments: object) -> int:
    import naive_vs_cached

    code: int = naive_vs_cached.main([str(argument) for argument in arguments])
    return code


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV after its comments."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


@pytest.mark.slow
def test_table_csv_plot_and_conclusion(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(
        "--shape", tiny, "--lengths", "6,3", "--prompt-length", 5, "--repeat", 2, "--threads", 1, "--out", tmp_path
    )
    assert code == 0
    out = capsys.readouterr().out
    assert "counted and formula agree exactly" in out
    assert "all 6 the same both ways" in out
    assert "threads used: 1" in out
    config = opt.read_config(BASE)
    rows = read(tmp_path / "naive_vs_cached_tiny.csv")
    assert [(row["mode"], row["tokens"]) for row in rows] == [
        ("naive", "3"), ("naive", "6"), ("cached", "3"), ("cached", "6"),
    ]  # fmt: skip
    for row in rows:
        steps = accounting.generation([5], int(row["tokens"]), use_cache=row["mode"] == "cached")
        assert int(row["flops_counted"]) == int(row["flops_formula"]) == accounting.flops(config, steps)
        assert 0 < float(row["seconds_min"]) <= float(row["seconds_median"]) <= float(row["seconds_max"])
    naive, cached = int(rows[1]["flops_counted"]), int(rows[3]["flops_counted"])
    assert f"For 6 tokens the naive way takes {naive / cached:.1f} times the FLOPs" in out
    assert (tmp_path / "naive_vs_cached_tiny.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_disagreement_is_said_and_exits_with_1(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = accounting.step_flops
    monkeypatch.setattr(
        accounting, "step_flops", lambda config, step: exact(config, step) + (step.parts[0].context == 18)
    )
    assert run("--shape", tiny, "--lengths", 4, "--repeat", 1, "--out", tmp_path) == 1
    assert "FLOPs DISAGREE: naive, 3 tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_a_checkpoint_in_place_of_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="writes the checkpoint")
    vocabulary = Path(__file__).parents[1] / "data" / "tokenizer"
    folder = tmp_path / "my-model"
    folder.mkdir()
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (folder / name).write_bytes((vocabulary / name).read_bytes())
    size = max(json.loads((vocabulary / "vocab.json").read_text(encoding="utf-8")).values()) + 1
    raw: dict[str, Any] = BASE | {"vocab_size": size}
    (folder / "config.json").write_text(json.dumps(raw))
    rng = np.random.default_rng(0)
    table = tensor_shapes(opt.read_config(raw))
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in table.items()}
    safetensors.save_file(tensors, folder / "model.safetensors")
    assert run("--model", folder, "--lengths", 3, "--repeat", 1, "--out", tmp_path) == 0
    assert "my-model" in capsys.readouterr().out
    assert (tmp_path / "naive_vs_cached_my-model.csv").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "opt-1"], "shape 'opt-1' is not known: expected one of"),
        (["--model", "no/such/folder"], "no/such/folder"),
        (["--shape", "tiny", "--lengths", "60"], "come to 76, and the model's context is 64"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    arguments: list[str], words: str, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [["--lengths", "3,x"], ["--lengths", ""], ["--repeat", "0"], ["--threads", "-1"], ["--shape", "a", "--model", "b"]],
)
def test_impossible_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2


def test_a_file_where_the_folder_should_be(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run("--shape", tiny, "--out", tmp_path / "file") == 2
    assert "cannot be made" in capsys.readouterr().err


def test_without_matplotlib_nothing_is_measured(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run("--shape", tiny, "--out", tmp_path) == 2
    assert install("plot") in capsys.readouterr().err


@pytest.mark.longer
def test_numpy_is_not_imported_before_the_threads_are_set(subprocess_environment: dict[str, str]) -> None:
    check = "import naive_vs_cached, sys; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=SCRIPTS, env=subprocess_environment, check=True)
