"""The benchmarks of whole runs as their users run them, on shapes that take no time."""

import csv
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.operations import Backend
from minillm.backends.timing import TimingBackend
from minillm.measure import accounting
from minillm.measure.accounting.hardware import Hardware
from minillm.models import opt, published

from ..backends.cpu import emulated
from ..shapes import BASE

pytest.importorskip("matplotlib", reason="plots need the plot extra")

Script = Callable[..., int]


def script(name: str) -> Script:
    return lambda *arguments: importlib.import_module(name).main([str(argument) for argument in arguments])


def read(path: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The facts at the head of a CSV, and its rows."""
    lines = path.read_text(encoding="utf-8").splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    return facts, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def ordered(row: dict[str, str], name: str) -> bool:
    return 0 < float(row[f"{name}_min"]) <= float(row[f"{name}_median"]) <= float(row[f"{name}_max"])


@pytest.mark.slow
def test_lengths_and_batches(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shape", tiny, "--lengths", "4,9", "--batches", "1,3", "--steps", 2, "--repeat", 2]
    assert script("lengths_and_batches")(*options, "--backend", "numpy", "--threads", 1, "--out", tmp_path) == 0
    facts, rows = read(tmp_path / "lengths_and_batches_tiny.csv")
    assert {"cpu", "commit", "versions", "question"} <= set(facts)
    assert [(row["batch"], row["length"]) for row in rows] == [("1", "4"), ("1", "9"), ("3", "4"), ("3", "9")]
    for row in rows:
        assert ordered(row, "prefill_seconds")
        assert ordered(row, "step_seconds")
        tokens = int(row["batch"]) * int(row["length"])
        seconds = float(row["prefill_seconds_median"])
        assert float(row["prefill_tokens_per_second"]) == pytest.approx(tokens / seconds, rel=0.01)
    assert (tmp_path / "lengths_and_batches_tiny.png").read_bytes().startswith(b"\x89PNG")
    assert "At batch 1 a prompt of 9 tokens takes" in capsys.readouterr().out


def test_a_task_computes_its_prompts_and_its_steps_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of more than one chunk, so that some decode while others are computed."""
    import lengths_and_batches

    from minillm import Engine

    monkeypatch.setitem(published(), "long", BASE | {"max_position_embeddings": 700})
    with Engine.random("long", max_batch_size=3, backend="numpy") as engine:
        lengths_and_batches.time_task(engine, lengths_and_batches.Task(3, 400), 4)
        assert not engine.busy
        assert engine.stats.prefill_tokens >= 3 * 400
        assert engine.stats.decode_tokens == 4 * 3  # all three in every timed step
        assert engine.runner.cache.free_pages == engine.runner.cache.num_pages


@pytest.mark.slow
def test_cpu_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every format, for few rows and for many, on so few copies of the weights that it takes no time."""
    module = importlib.import_module("cpu_kernels")
    monkeypatch.setattr("minillm.backends.cpu.launching._threads", 1)  # restored afterwards
    monkeypatch.setattr(module, "RING", 1 << 16)
    monkeypatch.setattr(module, "BURST", 1 << 14)
    monkeypatch.setattr(module, "bandwidth_probe", lambda threads: lambda: 10.0)
    options = ["--inputs", 64, "--outputs", 48, "--rows", "1,20", "--rounds", 1, "--threads", 1, "--out", tmp_path]
    assert script("cpu_kernels")(*options) == 0
    facts, rows = read(tmp_path / "cpu_kernels_64_48.csv")
    assert facts["compiler"]
    forms = ["float32", "float16", "bfloat16", "int8", "int4"]
    assert [(row["format"], row["rows"]) for row in rows] == [(form, n) for form in forms for n in ("1", "20")]
    for row in rows:
        nbytes = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1 + 2 / 32, "int4": 0.5 + 2 / 32}[row["format"]]
        seconds, gflops = float(row["ms"]) / 1e3, float(row["gflop_per_second"])
        assert gflops == pytest.approx(2 * int(row["rows"]) * 64 * 48 / seconds / 1e9, rel=0.02)
        assert float(row["gb_per_second"]) == pytest.approx(nbytes * 64 * 48 / seconds / 1e9, rel=0.02)
        assert float(row["share_of_bandwidth"]) == pytest.approx(float(row["gb_per_second"]) / 10, rel=0.02)
        assert float(row["times_numpy_float32"]) > 0
    assert "written: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(emulated.missing() is not None, reason=emulated.missing() or "")
def test_arm_instructions(tmp_path: Path) -> None:
    """Ours alone: twice the rows are at most twice the instructions, and at least the products'."""
    options = [
        "--inputs",
        256,
        "--outputs",
        16,
        "--rows",
        "6,12",
        "--formats",
        "int8",
        "--threads",
        1,
        "--out",
        tmp_path,
    ]
    assert script("arm_instructions")(*options) == 0
    rows = read(tmp_path / "arm_instructions.csv")[1]
    assert [(row["processor"], row["rows"]) for row in rows] == [
        (p, n) for p in ("dotprod", "i8mm") for n in ("6", "12")
    ]
    for fewer, more, each in ((*rows[:2], 16), (*rows[2:], 32)):
        few, many = (int(row["instructions"]) for row in (fewer, more))
        assert 6 * 256 * 16 / each < few < many < 2 * few and many - few > 6 * 256 * 16 / each
    assert "int8" in (tmp_path / "arm_instructions.txt").read_text()


@pytest.mark.slow
def test_dtypes(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.import_module("dtypes"), "REST_SECONDS", 0)
    options = ["--shape", tiny, "--backends", "numpy", "--prompt-length", 5, "--steps", 2, "--repeat", 2]
    assert script("dtypes")(*options, "--threads", 1, "--out", tmp_path) == 0
    facts, rows = read(tmp_path / "dtypes_tiny.csv")
    assert "commit" in facts
    assert [row["dtype"] for row in rows] == ["float32", "float16", "bfloat16", "int8", "int4"]
    assert all(ordered(row, "step_seconds") and ordered(row, "prefill_seconds") for row in rows)
    errors = [float(row["kl_nats_per_token"]) for row in rows]
    assert errors[0] == float(rows[0]["decode_speed_up"]) - 1 == 0
    assert 0 <= errors[1] < errors[2] < errors[4]  # 10, 7 and some 3 bits of mantissa
    moved = [int(row["bytes_read_per_step"]) for row in rows]
    config = opt.read_config(BASE)
    matrices = accounting.parameter_count(config) - accounting.looked_up(config).parameters
    assert moved[0] > 4 * matrices  # weights, and what else a step reads
    assert moved[0] - moved[1] > 1.8 * matrices  # vectors stay in float32
    assert moved[3] > moved[4]
    assert "On numpy bfloat16 decodes" in capsys.readouterr().out


def test_a_divergence_worked_out_by_hand() -> None:
    import dtypes

    p, q = np.array([[0.5, 0.5], [1.0, 1e-300]]), np.array([[0.25, 0.75], [1.0, 1e-300]])
    expected = (0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75)) / 2
    assert dtypes.divergence(np.log(p), np.log(q)) == pytest.approx(expected)


@pytest.mark.longer
def test_prediction(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine that does nothing but arithmetic the prediction is FLOPs over the rate, by the closed form."""
    machine = Hardware(name="a", rates={"float32": 1e9}, bandwidth=1e30, memory=1, source="thin air")
    monkeypatch.setattr("minillm.measure.profiling.probe_with", lambda backend, threads: machine)
    timed: list[Any] = []  # what would give products' times in the cache, which no closed form has

    def by_flops(backend: Backend, cached: Any) -> TimingBackend:
        timed.append(cached)
        return TimingBackend(backend)

    monkeypatch.setattr("minillm.measure.profiling.TimingBackend", by_flops)
    options = ["--shapes", tiny, "--prompt-length", 6, "--new-tokens", 4, "--repeat", 2, "--backend", "numpy"]
    assert script("prediction")(*options, "--threads", 1, "--out", tmp_path) == 0
    assert len(timed) == 2
    assert all(timed)
    facts, rows = read(tmp_path / "prediction.csv")
    assert "commit" in facts
    assert [(row["phase"], row["round"]) for row in rows] == [
        ("prefill", "1"), ("decode", "1"), ("prefill", "2"), ("decode", "2"),
    ]  # fmt: skip
    first, *later = (
        accounting.step_flops(opt.read_config(BASE), s) for s in accounting.generation([6], 4, use_cache=True)
    )
    expected = {"prefill": first / 1e9, "decode": sum(later) / len(later) / 1e9}
    for row in rows:
        predicted, measured = float(row["predicted_seconds"]), float(row["measured_seconds"])
        assert predicted == pytest.approx(expected[row["phase"]], abs=1e-6)
        assert float(row["error"]) == pytest.approx(predicted / measured - 1, abs=0.05)
    assert "The roofline's time is off the clock's: of prefill by" in capsys.readouterr().out
    assert (tmp_path / "prediction.txt").is_file()


@pytest.mark.slow
def test_strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import strategies

    monkeypatch.setattr(
        strategies, "WAYS", {n: w for n, w in strategies.WAYS.items() if n.startswith(("draft", "prompt"))}
    )
    assert strategies.main(["--max-new-tokens", "8", "--repeat", "1", "--threads", "1", "--out", str(tmp_path)]) == 0
    facts, rows = read(tmp_path / "strategies.csv")
    assert "commit" in facts
    assert [row["way"] for row in rows] == list(strategies.WAYS)
    assert float(rows[-1]["acceptance_rate"]) > 0.9  # the model drafts for itself
    assert all(ordered(row, "ms_per_token") and ordered(row, "without_ms_per_token") for row in rows)
    assert (tmp_path / "strategies.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens: the same with and without guesses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("lengths_and_batches", ["--shape", "opt-1"], "shape 'opt-1' is not known"),
        ("lengths_and_batches", ["--shape", "tiny", "--lengths", "60"], "and the model's context is 64"),
        ("dtypes", ["--backends", "cupy"], "backend 'cupy' is not known"),
        ("dtypes", ["--shape", "tiny", "--prompt-length", "60", "--backends", "numpy"], "the model's context is 64"),
        ("prediction", ["--shapes", "opt-125m,opt-1"], "shape 'opt-1' is not known"),
        ("prediction", ["--shapes", "tiny", "--prompt-length", "60"], "beyond the context of tiny"),
        ("strategies", ["--model", "no/such/folder"], "no/such/folder"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    name: str, arguments: list[str], words: str, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script(name)(*arguments, "--out", tmp_path) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{name}: ")]
    assert len(errors) == 1
    assert words in errors[0]
    assert not list(tmp_path.iterdir())
