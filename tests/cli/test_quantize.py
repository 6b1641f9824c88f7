"""minillm quantize and minillm perplexity."""

import json
import os
import re
import shlex
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minillm import Engine
from minillm.cli.main import run
from minillm.cli.output import bytes_text
from minillm.engine.loading import DEMO_MODEL
from minillm.formats.write_checkpoint import write_checkpoint as write_weights
from minillm.measure.precision import perplexity

from ..children import DEFAULT_SIGNALS, prepared
from ..tiny import write_checkpoint

PROMPT = "A list of colors: red,"


@pytest.mark.longer
def test_a_written_checkpoint_runs_as_any_other(tmp_path, capsys):
    out = tmp_path / "demo-int4"
    assert run(["quantize", str(DEMO_MODEL), str(out), "--dtype", "int4", "--group-size", "64"]) == 0
    assert capsys.readouterr().err == ""
    assert json.loads((out / "config.json").read_text())["quantization_config"]["group_size"] == 64
    assert (out / "model.safetensors").stat().st_size < 0.4 * (DEMO_MODEL / "model.safetensors").stat().st_size
    assert (out / "generation_config.json").read_bytes() == (DEMO_MODEL / "generation_config.json").read_bytes()
    assert run(["generate", "--model", str(out), "--backend", "numpy", "--prompt", PROMPT]) == 0
    assert capsys.readouterr().out.startswith(" orange, yellow,")


def test_a_checkpoint_without_a_tokenizer_is_written_without(tmp_path, capsys):
    source = write_checkpoint(tmp_path / "SRC")
    for name in ("vocab.json", "merges.txt"):
        (source / name).unlink()
    assert run(["quantize", str(source), str(tmp_path / "DST"), "--dtype", "int8"]) == 0
    assert {path.name for path in (tmp_path / "DST").iterdir()} == {path.name for path in source.iterdir()}
    with Engine(tmp_path / "DST", backend="numpy") as engine:
        assert len(engine.generate([5, 6], max_new_tokens=3, eos_token_id=[]).token_ids) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["SRC", "DST", "--dtype", "int3"], 2, ["int3", "int8, int4"]),
        (["SRC", "DST", "--dtype", "int4", "--group-size", "16"], 2, ["32 or 64", "16"]),
        (["SRC", "DST", "--dtype", "float16", "--group-size", "32"], 2, ["group size", "float16"]),
        (["SRC", "SRC", "--dtype", "int8"], 2, ["SRC", "exists"]),
        (["SRC", "no/such/DST", "--dtype", "int8"], 2, ["no folder", "no/such"]),
        (["./nowhere", "DST", "--dtype", "int8"], 1, ["nowhere"]),
        (["SRC", "DST", "--dtype", "int8", "--revision", "main"], 2, ["revision"]),
        (["QUANTISED", "DST", "--dtype", "int8"], 2, ["QUANTISED", "already quantised", "int4"]),
    ],
)
def test_a_mistake_is_one_clear_line(arguments, code, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "SRC")
    assert run(["quantize", "SRC", "QUANTISED", "--dtype", "int4"]) == 0
    capsys.readouterr()
    before = sorted(tmp_path.rglob("*"))
    assert run(["quantize", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    for word in words:
        assert word in captured.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.longer
def test_it_ends_with_errors_sizes_and_the_next_command(tmp_path, capsys):
    source, target = write_checkpoint(tmp_path / "SRC"), tmp_path / "a folder"
    worst = max(write_weights(source, tmp_path / "again", "int4"), key=lambda one: one.error)
    assert run(["quantize", str(source), str(target), "--dtype", "int4"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert set(captured.out) <= set(string.printable) - set("\r\x1b")
    head, *table, _, error, weights, following = captured.out.splitlines()
    assert head.split() == ["matrices", "number", "format", "error", "worst"]
    rows = {line.split()[0]: re.split(r"  +", line)[1:] for line in table}
    assert rows["embed_tokens"][:2] == ["1", "int8"]
    kind, layer = re.fullmatch(r"layers\.(\d)\.(.*)\.weight", worst.name).groups()[::-1]
    assert rows[f"layers.*.{kind}"][:2] == ["2", "int4"]
    assert rows[f"layers.*.{kind}"][3] == f"{worst.error:.2%} in layer {layer}"
    assert float(rows[f"layers.*.{kind}"][2].rstrip("%")) <= 100 * worst.error
    assert error.split(maxsplit=1) == ["error", f"at most {worst.error:.2%}, in {worst.name}"]
    before, after = ((folder / "model.safetensors").stat().st_size for folder in (source, target))
    assert weights.split(maxsplit=1)[1] == f"{bytes_text(before)} -> {bytes_text(after)}, {after / before:.0%} of it"
    name, program, *command = shlex.split(following)
    assert (name, program) == ("next", "minillm")
    assert run([*command, "--backend", "numpy"]) == 0


def test_a_dtype_that_the_weights_have_rounds_nothing(tmp_path, capsys):
    assert run(["quantize", str(DEMO_MODEL), str(tmp_path / "DST"), "--dtype", "float16"]) == 0
    assert "every weight is written as it was" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_leaves_nothing(tmp_path):
    source = write_checkpoint(tmp_path / "source", hidden_size=256, ffn_dim=2048, num_hidden_layers=12)
    process = subprocess.Popen(
        prepared(
            DEFAULT_SIGNALS, [sys.executable, "-m", "minillm", "quantize", source, tmp_path / "out", "--dtype", "int4"]
        ),
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while not list(tmp_path.glob(".out.partial-*/model.safetensors")) and time.monotonic() < until:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.strip()) == (130, "")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- perplexity -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_perplexity_of_a_text_by_dtype(tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text(PROMPT + " orange, yellow.\n", encoding="utf-8")
    arguments = ["perplexity", "--backend", "numpy", "--text", str(file)]
    assert run([*arguments, "--dtype", "int4, float32", "--json"]) == 0
    rows = {row["dtype"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(rows) == {"float32", "int4"}
    for dtype, row in rows.items():
        with Engine(dtype=dtype, backend="numpy", max_batch_size=1) as engine:
            assert row["perplexity"] == pytest.approx(perplexity(engine, PROMPT + " orange, yellow."), rel=1e-6)
    assert rows["float32"]["change"] == rows["float32"]["logit_error"] == 0
    assert rows["int4"]["change"] == pytest.approx(rows["int4"]["perplexity"] / rows["float32"]["perplexity"] - 1)
    assert 0.01 < rows["int4"]["logit_error"] < 0.3
    assert rows["int4"]["weight_bytes"] < rows["float32"]["weight_bytes"] / 5
    assert run([*arguments, "--dtype", "int4"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["dtype", "weights", "perplexity", "change", "logit", "error"]
    name, size, unit, value, change, error = line.split()
    assert (name, unit) == ("int4", "MB")
    assert float(size) == pytest.approx(rows["int4"]["weight_bytes"] / 1e6, abs=0.05)
    assert float(value) == pytest.approx(rows["int4"]["perplexity"], abs=5e-5)
    assert float(change.rstrip("%")) == pytest.approx(100 * rows["int4"]["change"], abs=0.005)
    assert float(error) == pytest.approx(rows["int4"]["logit_error"], rel=0.01)


def test_a_random_shape_has_logits_and_no_text(capsys, monkeypatch):
    from minillm.models import published

    from ..tiny import tiny_config

    monkeypatch.setitem(published(), "opt-tiny", tiny_config())
    assert run(["perplexity", "--shape", "opt-tiny", "--dtype", "int8,int4", "--json", "--backend", "numpy"]) == 0
    eight, four = map(json.loads, capsys.readouterr().out.splitlines())
    assert eight["perplexity"] is None and four["change"] is None
    assert 0 < eight["logit_error"] < four["logit_error"] / 5
    assert run(["perplexity", "--shape", "opt-tiny", "--dtype", "int8", "--backend", "numpy"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[3:5] == ["-", "-"]


@pytest.mark.longer
def test_a_quantised_folder_against_its_own_float32(tmp_path, capsys):
    out = tmp_path / "out"
    assert run(["quantize", str(DEMO_MODEL), str(out), "--dtype", "int8"]) == 0
    capsys.readouterr()
    text = tmp_path / "text.txt"
    text.write_text(PROMPT, encoding="utf-8")
    arguments = ["perplexity", "--model", str(out), "--text", str(text), "--backend", "numpy", "--json"]
    assert run([*arguments, "--dtype", "auto"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert abs(row["change"]) < 1e-4
    assert run([*arguments, "--dtype", "int4"]) == 2
    assert "already quantised to int8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--shape", "opt-1b"], 2, ["opt-1b", "opt-125m"]),
        (["--shape", "opt-125m", "--text", "a"], 2, ["--shape", "--text"]),
        (["--text", "no-such-file"], 2, ["no-such-file"]),
        (["--dtype", "int8,float99", "--shape", "opt-175b"], 1, ["float99", "bfloat16"]),
        (["--model", "./no-such-folder"], 1, ["no-such-folder"]),
    ],
)
def test_perplexity_names_what_is_wrong(arguments, code, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["perplexity", *arguments]) == code
    captured = capsys.readouterr()
    assert len(captured.err.strip().splitlines()) == 1
    for word in words:
        assert word in captured.err


def test_what_is_no_text_is_named(tmp_path: Path, capsys):
    file = tmp_path / "text.txt"
    file.write_bytes(b"caf\xe9")
    assert run(["perplexity", "--text", str(file)]) == 2
    assert "byte 3" in capsys.readouterr().err
