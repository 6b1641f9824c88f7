"""What `minillm profile` writes: a trace for Perfetto or chrome://tracing, and a picture."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .drawing import figure_module, save

if TYPE_CHECKING:
    from ..profiling import Phase, Profile, Step

COLOURS = {"embedding": "#7b6ca8", "layers": "#1f6fb2", "head": "#2b8a5f", "beside the model": "#b8860b"}
OUTSIDE = "#8a8a8a"
PROCESS = {"pid": 1, "tid": 1}


def trace(profile: "Profile", title: str) -> str:
    """The steps as JSON of the Trace Event Format: a step holds its layers, a layer its operations.

    Times are those of the watched steps, laid end to end: the turns of the run beside it are cut out.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", **PROCESS, "args": {"name": title}}]
    start = 0.0
    for number, step in enumerate(profile.steps):
        arguments = {"tokens": step.tokens, "seconds_without_watching": step.plain_seconds}
        events.append(_event(f"{step.phase} step {number}", "step", start, step.seconds, arguments))
        events += _inside(step, start, profile)
        start += step.seconds
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _inside(step: "Step", start: float, profile: "Profile") -> Iterator[dict[str, Any]]:
    """The layers and operations of a step."""
    from ..profiling import layer_spans

    for span in layer_spans(step.calls):
        name = {None: "embedding", profile.num_layers: "head"}.get(span.layer, f"layer {span.layer}")
        yield _event(name, "layer", start + span.began, span.seconds, {})
    for call in step.calls:
        arguments: dict[str, Any] = {}
        if call.cost is not None:
            arguments = call.cost._asdict() | {"floor_us": 1e6 * profile.ceilings.floor(call.cost)}
        yield _event(call.name, "operation", start + call.began, call.seconds, arguments)


def _event(name: str, category: str, start: float, seconds: float, arguments: dict[str, Any]) -> dict[str, Any]:
    """A complete event. The format wants microseconds; whole nanoseconds keep what is nested nested."""
    began, ended = round(1e9 * start), round(1e9 * (start + seconds))
    times = {"ts": began / 1e3, "dur": (ended - began) / 1e3}
    return {"ph": "X", "name": name, "cat": category, **times, **PROCESS, "args": arguments}


def draw(profile: "Profile", title: str, path: Path) -> None:
    """Draw each phase: its operations beside their floors, and its layers.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    phases = profile.phases
    rows = max(len(phase.rows) for phase in phases.values()) + 2
    figure = figure_module().Figure(figsize=(7.5 * len(phases), 3.6 + 0.3 * rows), layout="constrained")
    axes = figure.subplots(2, len(phases), squeeze=False, height_ratios=[0.3 * rows, 2])
    for column, (name, phase) in enumerate(phases.items()):
        tokens = f"{phase.tokens / phase.seconds:,.0f} tokens/s"
        axes[0][column].set_title(f"{name}: {1e3 * phase.seconds / len(phase.steps):.2f} ms a step, {tokens}")
        _draw_operations(axes[0][column], phase)
        _draw_layers(axes[1][column], phase)
    ceilings = profile.ceilings
    figure.suptitle(title)
    figure.supxlabel(
        f"Black line: the floor by {ceilings.hardware.name}, the larger of "
        f"bytes / {ceilings.bandwidth / 1e9:,.1f} GB/s and FLOPs / {ceilings.rate / 1e9:,.0f} GFLOP/s. "
        "×: measured over floor.",
        fontsize=8,
        color="0.35",
    )
    save(figure, path)


def _draw_operations(axis: Any, phase: "Phase") -> None:
    """A bar for each operation, a line at its floor, and its ratio."""
    scale = 1e3 / len(phase.steps)
    bars = [(row.name, row.seconds, row.floor, COLOURS[row.place]) for row in phase.rows]
    bars += [("between operations", phase.between_operations, 0.0, OUTSIDE)]
    bars += [("scheduler, strategy", phase.around, 0.0, OUTSIDE)]
    axis.barh(range(len(bars)), [scale * bar[1] for bar in bars], color=[bar[3] for bar in bars], height=0.7)
    widest = max(scale * max(seconds, floor) for _, seconds, floor, _ in bars)
    for i, (_, seconds, floor, _) in enumerate(bars):
        if floor:
            axis.vlines(scale * floor, i - 0.45, i + 0.45, color="black", linewidth=2)
        ratio = f"  {seconds / floor:.2f} ×" if floor else ""
        end = scale * max(seconds, floor) + 0.015 * widest
        axis.text(end, i, f"{scale * seconds:.3f}{ratio}", va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), [bar[0] for bar in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * widest)
    for place in dict.fromkeys(row.place for row in phase.rows):
        axis.barh(0, 0, color=COLOURS[place], label=place)
    axis.barh(0, 0, color=OUTSIDE, label="outside operations")
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    _plain(axis)
    axis.set_xlabel("ms a step")


def _draw_layers(axis: Any, phase: "Phase") -> None:
    """A bar for each layer, with a line at its floor."""
    scale = 1e3 / len(phase.steps)
    for i, layer in enumerate(phase.layers):
        place = "embedding" if layer.layer is None else "head" if layer.layer == phase.num_layers else "layers"
        axis.bar(i, scale * layer.seconds, color=COLOURS[place], width=0.8)
        axis.hlines(scale * layer.floor, i - 0.45, i + 0.45, color="black", linewidth=2)
    names = [
        "emb" if one.layer is None else "head" if one.layer == phase.num_layers else one.layer for one in phase.layers
    ]
    axis.set_xticks(range(len(names)), names, fontsize=7, rotation=90 if len(names) > 20 else 0)
    axis.set_xlabel("layer")
    axis.set_ylabel("ms a step")
    _plain(axis)


def _plain(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
