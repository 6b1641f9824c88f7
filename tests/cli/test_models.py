"""minillm models: what lies in the cache and in folders, and what is predicted for it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from minillm.cli.main import run
from minillm.formats.write_checkpoint import write_checkpoint as quantise
from minillm.measure.accounting import hardware
from minillm.measure.accounting.hardware import Hardware

from ..adapters import write_adapter
from ..tiny import write_checkpoint

MACHINE = Hardware(name="this machine", rates={"float32": 1e11}, bandwidth=1e10, memory=1 << 30, source="a test")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(hardware, "probe", lambda: MACHINE)
    return tmp_path / "hub"


def cached(cache: Path, name: str, revision: str = COMMIT, ref: str = "main") -> Path:
    """A model in huggingface_hub's layout."""
    repo = cache / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / ref).write_text(revision)
    published, blobs, snapshot = repo / "published", repo / "blobs", repo / "snapshots" / revision
    write_checkpoint(published)
    blobs.mkdir(exist_ok=True)
    snapshot.mkdir(parents=True)
    for path in published.iterdir():
        path.rename(blobs / f"{path.name}-{ref}")
        (snapshot / path.name).symlink_to(blobs / f"{path.name}-{ref}")
    published.rmdir()
    return snapshot


def listed(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, dict[str, Any]]:
    assert run(["models", *map(str, arguments), "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {entry["name"]: entry for entry in entries}


def test_the_cache_and_folders_by_the_names_that_model_takes(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["models"]) == 0
    assert capsys.readouterr().out == "no models here: minillm pull ID fetches one from the hub\n"
    own = write_checkpoint(tmp_path / "own" / "minillm" / "models" / "fetched")
    assert set(listed(capsys)) == set(listed(capsys, own.parent)) == {str(own)}
    shutil.rmtree(own.parent)
    snapshot = cached(cache, "tiny/model")
    folder = write_checkpoint(tmp_path / "mine" / "deep" / "er")
    entries = listed(capsys, tmp_path / "mine")
    assert set(entries) == {"tiny/model", str(folder)}
    ours = entries["tiny/model"]
    assert ours["bytes"] == sum(path.stat().st_size for path in snapshot.iterdir())
    assert (ours["format"], ours["family"], ours["parameters"], ours["problem"]) == ("float32", "opt", 32_528, None)
    cached(cache, "tiny/model", "f" * 40, "v2")
    assert set(listed(capsys)) == {"tiny/model@main", "tiny/model@v2"}


@pytest.mark.longer
def test_the_prediction_is_that_of_the_roofline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "base", hidden_size=256, word_embed_proj_dim=256, ffn_dim=1024)
    quantise(folder, tmp_path / "int4", "int4", None)
    entries = listed(capsys, tmp_path)
    rates = {}
    for name in ("base", "int4"):
        entry = entries[str(tmp_path / name)]
        rates[name] = entry["tokens_per_second"]
        assert run(["analyze", str(tmp_path / name), "--hardware", "this", "--json"]) == 0
        decode = json.loads(capsys.readouterr().out)["decode"]
        assert rates[name] == pytest.approx(decode["tokens_per_second"])
        assert rates[name] == pytest.approx(MACHINE.bandwidth / decode["bytes"], rel=0.2)
    E, F, V = 256, 1024, 512
    matrices = 2 * (4 * E * E + 2 * E * F) + V * E
    assert rates["base"] == pytest.approx(MACHINE.bandwidth / (4 * matrices), rel=0.1)
    assert 3 < rates["int4"] / rates["base"] < 7.2
    assert entries[str(tmp_path / "int4")]["format"] == "int4"


def test_gguf_files_are_models_of_their_own(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf", reason="writing the file needs the extra gguf")
    from ..gguf_files import Type, write_llama

    snapshot = cached(cache, "tiny/model")
    for path in snapshot.iterdir():
        path.unlink()
    types = {"a.gguf": Type.Q8_0, "b.gguf": Type.Q4_0, "c.gguf": Type.F32}
    for name, kind in types.items():
        values = write_llama(snapshot / name, type_of=lambda _, kind=kind: kind)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "cut.gguf").write_bytes((snapshot / "a.gguf").read_bytes()[:5000])
    entries = listed(capsys, tmp_path / "mine")
    rates = {}
    for name, kind in types.items():
        entry = entries[f"tiny/model/{name}"]
        assert (entry["format"], entry["problem"]) == (f"GGUF {kind.name}", None)
        assert entry["parameters"] == sum(array.size for array in values.values())
        rates[name] = entry["tokens_per_second"]
    assert rates["b.gguf"] > rates["a.gguf"] > 2 * rates["c.gguf"]
    cut = entries[str(tmp_path / "mine" / "cut.gguf")]
    assert cut["problem"] is not None and cut["tokens_per_second"] is None


@pytest.mark.longer
def test_what_does_not_run_is_listed_with_the_reason(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    for name in ("cut", "family", "json", "shape", "quantised", "empty"):
        write_checkpoint(mine / name)
    (mine / "cut" / "model.safetensors").write_bytes(b"x")
    (mine / "json" / "config.json").write_text("{")
    (mine / "empty" / "model.safetensors").unlink()
    changes = {"family": ("opt", "mamba"), "shape": ('"ffn_dim": 40', '"ffn_dim": 41')}
    for name, (old, new) in changes.items():
        config = mine / name / "config.json"
        config.write_text(config.read_text().replace(old, new))
    config = mine / "quantised" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "novel", "bits": 3}})
    )
    write_adapter(mine / "adapter")
    damaged = cached(cache, "tiny/damaged")
    (cache / "models--tiny--damaged" / "refs" / "main").unlink()
    for path in damaged.iterdir():
        path.resolve().unlink()
    entries = listed(capsys, mine)
    problems = {Path(name).name: entry["problem"] for name, entry in entries.items()}
    for name, says in {
        "cut": "truncated, damaged or no safetensors file",
        "family": "model_type is 'mamba'",
        "json": "expected a JSON text",
        "shape": "tensor layers.0.fc1.weight should have shape [41, 32]",
        "quantised": "novel",
        "empty": "holds no weights",
        "adapter": "give it as --adapter",
        "damaged": "",
    }.items():
        assert says in problems[name] and "\n" not in problems[name], name
    assert all(entry["tokens_per_second"] is None for entry in entries.values())
    assert entries[str(mine / "quantised")]["format"] == "novel 3 bits"
    write_checkpoint(mine / "large")
    monkeypatch.setattr(hardware, "probe", lambda: Hardware(**vars(MACHINE) | {"memory": 1000}))
    assert "of memory, 1.000 kB are free" in listed(capsys, mine)[str(mine / "large")]["problem"]


def test_the_table_fits_a_terminal_and_is_whole_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = write_checkpoint(tmp_path / ("a-model-" * 12))
    assert run(["models", str(tmp_path)]) == 0
    piped = capsys.readouterr().out
    assert str(long) in piped and "predicted for one sequence" in piped
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["models", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" in lines[1]


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", str(tmp_path / "none")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert run(["models", "--hardware", "abacus"]) == 2
    assert "hardware 'abacus' is not known" in capsys.readouterr().err
