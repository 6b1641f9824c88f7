"""minillm profile: its tables, its JSON, its trace and its picture."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from minillm.cli.main import run
from minillm.measure.accounting.hardware import Hardware
from minillm.models import published

from ..shapes import BASE

NEW, PROMPT, REPEAT, LAYERS = 4, 7, 2, BASE["num_hidden_layers"]
WORK = ["--new-tokens", NEW, "--prompt-length", PROMPT, "--repeat", REPEAT, "--backend", "numpy"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small shape, and a machine that need not be probed."""
    monkeypatch.setitem(published(), "small", BASE)
    machine = Hardware(name="thin air", rates={"float32": 1e11}, bandwidth=2e10, memory=1, source="none")
    monkeypatch.setattr("minillm.measure.profiling.probe_with", lambda backend, threads: machine)


def call(*arguments: object) -> int:
    return run(["profile", "--shape", "small", *map(str, [*WORK, *arguments])])


@pytest.mark.longer
def test_tables_show_every_operation_the_whole_and_what_watching_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    out = capsys.readouterr().out
    assert "small on numpy, 1 prompt of 7 tokens, 4 new" in out
    assert "floors by thin air: 20.0 GB/s from memory, 100 GFLOP/s" in out
    prefill, decode = out.split("\n\n")[1:3]
    assert prefill.startswith(f"prefill: {REPEAT} steps, ")
    assert decode.startswith(f"decode: {REPEAT * (NEW - 1)} steps, ")
    for table in (prefill, decode):
        lines = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()[2:]]
        rows = {name: cells for name, *cells in lines}
        assert rows["linear fc1"][0] == rows["attend"][0] == str(LAYERS)
        assert rows["linear embed_tokens"][0] == "1"
        floor, measured, ratio = map(float, rows["operations"][1:])
        whole = float(rows["the whole step"][-2])
        outside = [float(rows[name][-1]) for name in ("between operations (Python)", "scheduler, cache and strategy")]
        assert measured + sum(outside) == pytest.approx(whole, abs=0.002)
        assert rows["layers (3)"] == []
        assert floor <= measured
        assert ratio > 1
    assert "profiling overhead: " in out


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json", "--batch", 2) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"]["bandwidth"] == 2e10
    decode = found["phases"]["decode"]
    assert (decode["steps"], decode["tokens"]) == (REPEAT * (NEW - 1), 2 * REPEAT * (NEW - 1))
    counted = [row for row in decode["operations"] if "flops" in row]
    assert sum(row["flops"] for row in counted) == decode["flops"]
    assert sum(row["floor"] for row in counted) == pytest.approx(decode["floor"])
    parts = [decode[f"seconds_{part}"] for part in ("in_operations", "between_operations", "around")]
    assert sum(parts) == pytest.approx(decode["seconds"])
    assert [layer["layer"] for layer in decode["layers"]] == [None, *range(LAYERS), LAYERS]


def events_of(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["displayTimeUnit"] == "ms"
    return [event for event in found["traceEvents"] if event["ph"] == "X"]


@pytest.mark.longer
def test_the_trace_nests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the format's own rule: on one thread, each event lies within another or apart from it."""
    path = tmp_path / "trace.json"
    assert call("--trace", path) == 0
    assert f"written: {path}" in capsys.readouterr().out
    events = events_of(path)
    by_kind = {kind: [e for e in events if e["cat"] == kind] for kind in ("step", "layer", "operation")}
    steps = REPEAT * NEW
    assert [len(by_kind[kind]) for kind in ("step", "layer")] == [steps, steps * (LAYERS + 2)]
    per_step = [8 * LAYERS + 3 + 3 + (i % NEW == 0) for i in range(steps)]  # a prefill takes rows, too
    assert len(by_kind["operation"]) == sum(per_step)
    order = {"step": 0, "layer": 1, "operation": 2}
    stack: list[tuple[int, str]] = []  # the ends of the events around this one, and their kinds
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"], order[e["cat"]])):
        began = round(1e3 * event["ts"])  # whole nanoseconds
        ended = began + round(1e3 * event["dur"])
        while stack and stack[-1][0] <= began:
            stack.pop()
        assert all(ended <= outer for outer, _ in stack)
        inside = {
            "step": [],
            "layer": ["step"],
            "operation": ["step", "layer"] if "flops" in event["args"] else ["step"],
        }
        assert [kind for _, kind in stack] == inside[event["cat"]]
        stack.append((ended, event["cat"]))


@pytest.mark.slow
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    assert call("--png", tmp_path / "a.png") == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_texts_of_the_picture_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the extents that matplotlib measures: names, times, ratios, titles and the legend."""
    pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figure = Figure(layout="constrained", dpi=140)
    monkeypatch.setattr("minillm.cli.profile.write_figure", lambda path, draw, **data: draw(figure, **data))
    assert call("--png", "unused.png") == 0
    FigureCanvasAgg(figure).draw()
    axes = [axis for each in figure.findobj(Axes) for axis in (each.xaxis, each.yaxis)]
    ticks = {text for axis in axes for tick in axis.get_major_ticks() for text in (tick.label1, tick.label2)}
    drawn = {text for axis in axes for tick in axis._update_ticks() for text in (tick.label1, tick.label2)}
    beyond_the_view = ticks - drawn
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    shown = {text: text.get_window_extent() for text in texts if text not in beyond_the_view}
    assert [one.get_text() for one in shown].count("ms") == 2
    for (one, box), (other, beyond) in combinations(shown.items(), 2):
        assert not box.padded(-1).overlaps(beyond.padded(-1)), f"{one} covers {other}"
    names = [one.x1 for text, one in shown.items() if text.get_text() == "scheduler, strategy"]
    starts = [one.x0 for text, one in shown.items() if text.get_text().startswith("layer_norm self")]
    assert starts[1] - names[0] > 400  # pixels from the names of one phase to those of the next


def test_floors_of_a_published_chip(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--hardware", "h200", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["hardware"]["name"], found["hardware"]["bandwidth"]) == ("H200 SXM", 4.8e12)


def test_a_single_token_has_no_decode_phase(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--new-tokens", 1, "--json") == 0
    assert list(json.loads(capsys.readouterr().out)["phases"]) == ["prefill"]


@pytest.mark.longer
def test_the_model_inside_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "--prompt-length", "5", "--new-tokens", "2", "--repeat", "1", "--backend", "numpy"]) == 0
    assert "the model inside minillm on numpy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "opt-9b"], "shape 'opt-9b' is not known: expected one of opt-125m"),
        (["--model", "a"], "--shape stands in place of a model"),
        (["--prompt-length", "62"], "come to 66, and the model's context is 64"),
        (["--batch", "0"], "--batch should be at least 1, found 0"),
        (["--repeat", "-1"], "--repeat should be at least 1"),
        (["--hardware", "abacus"], "hardware 'abacus' is not known: expected one of a100"),
        (["--backend", "cupy"], "backend 'cupy' is not known"),
    ],
)
def test_what_cannot_be_run_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*arguments) in (1, 2)
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--trace", "--png"])
def test_a_file_that_cannot_be_written(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if option == "--png":
        pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    assert call(option, tmp_path / "no" / "a.png") == 2
    assert "cannot be written" in capsys.readouterr().err
