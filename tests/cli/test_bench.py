"""minillm bench: what it lists, what it runs, and where there is nothing to run."""

from pathlib import Path

import pytest

from minillm.cli import bench
from minillm.cli.main import run

ROOT = Path(__file__).parents[2]

SCRIPT = '''"""How long is a piece of string? As long as
its options say.
"""
import sys
from pathlib import Path
Path(__file__).with_suffix(".said").write_text(" ".join(sys.argv[1:]))
sys.exit("--fail" in sys.argv)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two benchmarks and a module that only helps them."""
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(SCRIPT)
    (tmp_path / "harness.py").write_text('"""What they share."""\n')
    return tmp_path


def said(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.said"))}


def test_it_lists_each_script_with_its_question(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench"]) == 0
    assert capsys.readouterr().out == "a  How long is a piece of string?\nb  How long is a piece of string?\n"
    assert said(folder) == {}


def test_it_runs_what_is_named_with_the_options_after_it(folder: Path) -> None:
    assert run(["bench", "b", "--shape", "x", "-n", "3"]) == 0
    assert said(folder) == {"b": "--shape x -n 3"}


def test_it_runs_all(folder: Path) -> None:
    assert run(["bench", "all"]) == 0
    assert said(folder) == {"a": "", "b": ""}


def test_a_failure_is_reported_after_the_others_ran(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "a", "b", "--fail"]) == 1
    assert "minillm: a, b failed: see above" in capsys.readouterr().err
    assert said(folder) == {"a": "--fail", "b": "--fail"}


def test_an_unknown_name_lists_the_known(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "c"]) == 2
    assert "benchmark 'c' is not known: expected a, b, or all" in capsys.readouterr().err


def test_where_there_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "benchmarks")
    assert run(["bench"]) == 1
    error = capsys.readouterr().err
    assert "of a checkout" in error
    assert error.count("\n") == 1


@pytest.mark.longer
def test_every_script_of_the_checkout_asks_its_question() -> None:
    """A script that can be run and asks none would be missing from the list."""
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    helpers = {name for name in scripts if name == "harness" or name.startswith(("peer_", "gpu_", "serve_", "rank_"))}
    helpers.remove("gpu_host")
    assert set(bench.find(ROOT / "benchmarks")) == scripts - helpers
