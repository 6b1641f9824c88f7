"""minillm profile: time of each operation of a real run, with its roofline floor."""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError
from ..output_files import write_file
from .drawing import figure_module, save
from .options import add_model_options, load_engine
from .terminal import as_json

if TYPE_CHECKING:
    from ..engine import Engine
    from ..profiling import Phase, Profile, Row, Step


COLOURS = {"embedding": "#7b6ca8", "layers": "#1f6fb2", "head": "#2b8a5f", "beside the model": "#b8860b"}
OUTSIDE = "#8a8a8a"
PROCESS = {"pid": 1, "tid": 1}


def trace(profile: "Profile", title: str) -> str:
    """The steps as JSON in the Trace Event Format: operations nested in layers, layers in steps.

    Times are those of the profiled steps, concatenated: the plain run's steps between them are cut out.
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
    """Events of a step's layers and operations."""
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
    """A complete event, in microseconds rounded to nanoseconds so that nesting is exact."""
    began, ended = round(1e9 * start), round(1e9 * (start + seconds))
    times = {"ts": began / 1e3, "dur": (ended - began) / 1e3}
    return {"ph": "X", "name": name, "cat": category, **times, **PROCESS, "args": arguments}


def draw(profile: "Profile", title: str, path: Path) -> None:
    """Draw the operations and layers of each phase with their floors.

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
    """A bar per operation, with a line at its floor and its ratio."""
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
    """A bar per layer, with a line at its floor."""
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


DESCRIPTION = """Time each operation, layer and phase of a real run.

The floor of an operation is the time that its bytes or its FLOPs take at the
machine's full rate, whichever is longer. A short probe measures the rates of a
processor; those of a GPU are published, and --hardware names it.
Bytes are counted as if each operation ran alone and nothing stayed in a
processor's cache: what did stay there can be faster than its floor.

The same run goes on beside, unwatched, and takes turns with it: what watching
costs is printed, too. On a GPU the unwatched run replays recorded steps, which
cannot be watched, and the difference shows what recording saves."""

EPILOG = """examples:
  minillm profile --prompt-length 64
  minillm profile --shape opt-125m --png profile.png --trace profile.json
  (open the trace at https://ui.perfetto.dev)
"""


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "profile",
        help="where the time of a run goes",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    parser.add_argument("--shape", help="a published shape with random weights in place of a model: opt-125m ...")
    work = parser.add_argument_group("work")
    work.add_argument("--prompt-length", type=int, default=128, metavar="N", help="tokens (default: 128)")
    work.add_argument("--new-tokens", type=int, default=32, metavar="N", help="to generate (default: 32)")
    work.add_argument("--batch", type=int, default=1, metavar="N", help="prompts side by side (default: 1)")
    work.add_argument("--repeat", type=int, default=3, metavar="N", help="rounds (default: 3)")
    work.add_argument(
        "--hardware", default="this", help="whose floors: this (default: a processor is probed), a100, h100, h200, ..."
    )
    output = parser.add_argument_group("output")
    output.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    output.add_argument("--png", type=Path, metavar="FILE", help="draw operations and layers beside their floors")
    output.add_argument("--json", action="store_true", help="one JSON object with all figures, in seconds")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..hardware import THIS, find_hardware
    from ..profiling import probe_with, profile
    from .drawing import figure_module

    for name in ("prompt_length", "new_tokens", "batch", "repeat"):
        if getattr(args, name) < 1:
            raise ParameterError(f"--{name.replace('_', '-')} should be at least 1, found {getattr(args, name)}")
    if args.png is not None:
        figure_module()
    engine = _load(args)
    longest, context = args.prompt_length + args.new_tokens, engine.config.max_positions
    if longest > context:
        raise ParameterError(
            f"prompt and new tokens come to {longest}, and the model's context is {context}: "
            "lower --prompt-length or --new-tokens"
        )
    prompts = [_prompt(number, args.prompt_length, engine.config.vocab_size) for number in range(args.batch)]
    backend = engine.runner.backend
    hardware = probe_with(backend, args.threads) if args.hardware == THIS else find_hardware(args.hardware)
    found = profile(
        engine,
        prompts,
        repeat=args.repeat,
        hardware=hardware,
        max_new_tokens=args.new_tokens,
        eos_token_id=(),
    )
    title = _title(args, engine)
    if args.trace is not None:
        write_file(args.trace, trace(found, title))
    if args.png is not None:
        draw(found, title, args.png)
    if args.json:
        print(as_json(as_dict(found, title)))
    else:
        print("\n".join(report(found, title)))
        for path in (args.trace, args.png):
            if path is not None:
                print(f"written: {path}")


def _load(args: argparse.Namespace) -> "Engine":
    from ..engine import Engine

    if args.shape is None:
        return load_engine(args, prompts=args.batch)
    if any(getattr(args, name) is not None for name in ("model", "revision", "tokenizer")):
        raise ParameterError("--shape stands in place of a model: leave --model, --revision and --tokenizer out")
    placement = {name: getattr(args, name) for name in ("dtype", "device", "backend", "cache_dtype", "threads")}
    return Engine.random(args.shape, max_batch_size=args.batch, **placement)


def _prompt(number: int, length: int, vocab_size: int) -> list[int]:
    """Token ids that differ from prompt to prompt."""
    return [(7919 * i + 104_729 * number + 11) % vocab_size for i in range(length)]


def _title(args: argparse.Namespace, engine: "Engine") -> str:
    model = args.shape or args.model or "the model inside minillm"
    prompts = f"{args.batch} prompt{'s' if args.batch > 1 else ''} of {args.prompt_length} tokens"
    return f"{model} on {engine.runner.backend.name}, {prompts}, {args.new_tokens} new"


def report(profile: "Profile", title: str) -> list[str]:
    """The tables as lines of text."""
    ceilings = profile.ceilings
    bandwidth, rate, name = ceilings.bandwidth / 1e9, ceilings.rate / 1e9, ceilings.hardware.name
    lines = [title, f"floors by {name}: {bandwidth:,.1f} GB/s from memory, {rate:,.0f} GFLOP/s in products"]
    for name, phase in profile.phases.items():
        lines += ["", *_phase(name, phase)]
    quarters = [profile.overhead[len(profile.steps) * i // 4] for i in (1, 3)]
    lines += [
        "",
        f"watching: {profile.median_overhead:+.1%} a step, the median of {len(profile.steps)} watched steps beside the "
        f"same ones unwatched (quartiles {quarters[0]:+.1%} and {quarters[1]:+.1%})",
    ]
    return lines


def _phase(name: str, phase: "Phase") -> list[str]:
    """The table of one phase: a line per operation, then the sum of the parts and the total."""
    steps = len(phase.steps)
    scale = 1e3 / steps
    lines = [
        f"{name}: {steps} step{'s' if steps > 1 else ''}, {scale * phase.seconds:.3f} ms a step, "
        f"{phase.tokens / phase.seconds:,.1f} tokens/s",
        f"{'a step':<38}{'calls':>6}{'floor, ms':>11}{'measured':>10}{'ratio':>8}"
        f"{'GFLOP/s':>10}{'share':>7}{'GB/s':>9}{'share':>7}",
    ]
    place = None
    for row in phase.rows:
        if row.place != place:
            place = row.place
            lines.append(f"  {place}{f' ({phase.num_layers})' if place == 'layers' else ''}")
        lines.append(_row(row, phase))
    inner = [scale * layer.seconds for layer in phase.layers if layer.layer not in (None, phase.num_layers)]
    least, most = min(inner), max(inner)
    ratio = phase.seconds / phase.floor
    return [
        *lines,
        f"  {'operations':<36}{sum(row.calls for row in phase.rows) / steps:>6.0f}"
        f"{scale * phase.floor:>11.3f}{scale * phase.in_operations:>10.3f}{phase.in_operations / phase.floor:>8.2f}",
        f"  {'between operations (Python)':<53}{scale * phase.between_operations:>10.3f}",
        f"  {'scheduler, cache and strategy':<53}{scale * phase.around:>10.3f}",
        f"  {'the whole step':<42}{scale * phase.floor:>11.3f}{scale * phase.seconds:>10.3f}{ratio:>8.2f}",
        f"  a layer takes {least:.3f} to {most:.3f} ms: the fastest is {inner.index(least)}, "
        f"the slowest {inner.index(most)}",
    ]


def _row(row: "Row", phase: "Phase") -> str:
    """The line of one operation."""
    steps, ceilings = len(phase.steps), phase.ceilings
    calls, measured = f"{row.calls / steps:>6.3g}", f"{1e3 * row.seconds / steps:>10.3f}"
    if row.cost is None:
        return f"    {row.name:<34}{calls}{'':>11}{measured}"
    rate, flow = row.cost.flops / row.seconds, (row.cost.bytes_read + row.cost.bytes_written) / row.seconds
    return (
        f"    {row.name:<34}{calls}{1e3 * row.floor / steps:>11.3f}{measured}{row.ratio:>8.2f}"
        f"{rate / 1e9:>10.2f}{rate / ceilings.rate:>7.0%}"
        f"{flow / 1e9:>9.2f}{flow / ceilings.bandwidth:>7.0%}"
    )


def as_dict(profile: "Profile", title: str) -> dict[str, Any]:
    """The output of --json: sums over all steps, in seconds, bytes and FLOPs."""
    return {
        "title": title,
        "hardware": dataclasses.asdict(profile.ceilings.hardware),
        "overhead": profile.median_overhead,
        "phases": {name: _phase_as_dict(phase) for name, phase in profile.phases.items()},
    }


def _phase_as_dict(phase: "Phase") -> dict[str, Any]:
    return {
        "steps": len(phase.steps),
        "tokens": phase.tokens,
        "seconds": phase.seconds,
        "seconds_in_operations": phase.in_operations,
        "seconds_between_operations": phase.between_operations,
        "seconds_around": phase.around,
        "floor": phase.floor,
        **phase.cost._asdict(),
        "operations": [_row_as_dict(row) for row in phase.rows],
        "layers": [layer._asdict() for layer in phase.layers],
    }


def _row_as_dict(row: "Row") -> dict[str, Any]:
    result: dict[str, Any] = {"place": row.place, "name": row.name, "calls": row.calls, "seconds": row.seconds}
    if row.cost is not None:
        result |= {"floor": row.floor, "ratio": row.ratio, **row.cost._asdict()}
    return result
