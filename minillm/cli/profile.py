"""minillm profile: time of each operation of a real run, with its roofline floor."""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError
from ..output_files import check_writable, write_file
from .options import add_model_options, load_engine
from .output import Table, as_json, print_report
from .parser import Parser
from .plots import draw_profile, need_matplotlib, write_figure

if TYPE_CHECKING:
    from ..measure.profiling import Profile, ProfiledStep

DESCRIPTION = """Time each operation, layer and phase of a real run.

The floor of an operation is the time that its bytes or its FLOPs take at the
machine's full rate, whichever is longer. A short probe measures the rates of a
processor; those of a GPU are published, and --hardware names it.
Bytes are counted as if each operation ran alone and nothing stayed in a
processor's cache: what did stay there can be faster than its floor.

Each step also runs without profiling, and the overhead of profiling is printed.
On a GPU the run without it replays recorded steps, which cannot be profiled, so
that the difference shows what recording saves."""

EPILOG = """examples:
  minillm profile --prompt-length 64
  minillm profile --shape opt-125m --png profile.png --trace profile.json
  (open the trace at https://ui.perfetto.dev)
"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    add_model_options(parser, parallel=True)
    parser.add_argument("--shape", help="a published shape with random weights in place of a model: opt-125m ...")
    work = parser.add_argument_group("work")
    work.add_argument("--prompt-length", type=int, default=128, metavar="N", help="tokens (default: 128)")
    work.add_argument("--new-tokens", type=int, default=32, metavar="N", help="to generate (default: 32)")
    work.add_argument("--batch", type=int, default=1, metavar="N", help="prompts side by side (default: 1)")
    work.add_argument("--repeat", type=int, default=3, metavar="N", help="rounds (default: 3)")
    work.add_argument(
        "--hardware",
        default="this",
        help="source of the floors: this (default; measures a processor), a100, h100, ...",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    output.add_argument("--png", type=Path, metavar="FILE", help="draw operations and layers beside their floors")
    output.add_argument("--json", action="store_true", help="one JSON object with all figures, in seconds")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..measure.accounting.hardware import THIS, find_hardware
    from ..measure.profiling import CachedProducts, probe_with, profile

    for name in ("prompt_length", "new_tokens", "batch", "repeat"):
        if getattr(args, name) < 1:
            raise ParameterError(f"--{name.replace('_', '-')} should be at least 1, found {getattr(args, name)}")
    check_writable(args.trace, args.png)
    if args.png is not None:
        need_matplotlib(args.png)
    engine = load_engine(args, sequences=args.batch, prefix_cache=False)
    longest, context = args.prompt_length + args.new_tokens, engine.config.max_positions
    if longest > context:
        raise ParameterError(
            f"prompt and new tokens come to {longest}, and the model's context is {context}: "
            "lower --prompt-length or --new-tokens"
        )
    prompts = [  # token ids that differ from prompt to prompt
        [(7919 * i + 104_729 * number + 11) % engine.config.vocab_size for i in range(args.prompt_length)]
        for number in range(args.batch)
    ]
    backend = engine.runner.backend
    this = args.hardware == THIS
    hardware = probe_with(backend, args.threads) if this else find_hardware(args.hardware)
    options = {
        "cached": CachedProducts(backend) if this else None,
        "repeat": args.repeat,
        "max_new_tokens": args.new_tokens,
        "eos_token_id": (),
    }
    measured = profile(engine, prompts, hardware=hardware, **options)
    model = args.shape or args.model or "the model inside minillm"
    work = f"{args.batch} prompt{'s' if args.batch > 1 else ''} of {args.prompt_length} tokens, {args.new_tokens} new"
    rank = "" if engine.ranks is None else f" (rank 0 of {engine.ranks.parallel.devices})"
    title = f"{model} on {backend.name}{rank}, {work}"
    if args.trace is not None:
        write_file(args.trace, trace(measured, title))
    if args.png is not None:
        write_figure(args.png, draw_profile, profile=measured, title=title)
    if args.json:
        print(as_json(as_dict(measured, title)))
    else:
        print_report(report(measured, title))
        for path in (args.trace, args.png):
            if path is not None:
                print(f"written: {path}")


def report(profile: "Profile", title: str) -> list[str | Table]:
    """The tables and what stands around them, for `print_report`."""
    bandwidth, peak, name = profile.hardware.bandwidth / 1e9, profile.peak / 1e9, profile.hardware.name
    low, high = (profile.overhead[len(profile.steps) * i // 4] for i in (1, 3))
    floors = f"floors by {name}: {bandwidth:,.1f} GB/s from memory, {peak:,.0f} GFLOP/s in products"
    if any(call.cached for step in profile.steps for call in step.calls):
        floors += ", and each product's time in the cache"
    overhead = (
        f"profiling overhead: {profile.median_overhead:+.1%} a step, the median of {len(profile.steps)} steps against "
        f"the same ones without profiling (quartiles {low:+.1%} and {high:+.1%})"
    )
    lines: list[str | Table] = [title, floors]
    for name, phase in profile.phases.items():
        lines += ["", _table(name, phase)]
    return [*lines, "", overhead]


def _table(name: str, phase: "Profile") -> Table:
    """The table of one phase: a line per operation, then the sum of the parts and the total."""
    steps = len(phase.steps)

    def row(label: str, seconds: float, floor: float = 0.0, calls: str = "") -> list[str]:
        floor_ms, ratio = (f"{1e3 * floor / steps:.3f}", f"{seconds / floor:.2f}") if floor else ("", "")
        return [label, calls, floor_ms, f"{round(1e3 * seconds / steps, 3) + 0.0:.3f}", ratio]  # no "-0.000"

    rows, place = [], None
    for operation in phase.operations:
        if operation.place != place:
            place = operation.place
            rows.append([f"  {place} ({phase.num_layers})" if place == "layers" else f"  {place}"])
        rows.append(row(f"    {operation.name}", operation.seconds, operation.floor, f"{operation.calls / steps:.4g}"))
        if (cost := operation.cost) is not None:
            rate, flow = cost.flops / operation.seconds, (cost.bytes_read + cost.bytes_written) / operation.seconds
            rows[-1] += [f"{rate / 1e9:.2f}", f"{rate / phase.peak:.0%}"]
            rows[-1] += [f"{flow / 1e9:.2f}", f"{flow / phase.hardware.bandwidth:.0%}"]
    calls = sum(operation.calls for operation in phase.operations)
    rows += [
        row("  operations", phase.in_operations, phase.floor, f"{calls / steps:.0f}"),
        row("  between operations (Python)", phase.between_operations),
        row("  scheduler, cache and strategy", phase.around),
        row("  the whole step", phase.seconds, phase.floor),
    ]
    inner = [1e3 * layer.seconds / steps for layer in phase.layers if layer.layer not in (None, phase.num_layers)]
    least, most = min(inner), max(inner)
    return Table(
        ("a step", "calls", "floor, ms", "measured", "ratio", "GFLOP/s", "share", "GB/s", "share"),
        rows,
        title=f"{name}: {steps} step{'s' if steps > 1 else ''}, {1e3 * phase.seconds / steps:.3f} ms a step, "
        f"{phase.tokens / phase.seconds:,.1f} tokens/s",
        note=f"  a layer takes {least:.3f} to {most:.3f} ms: the fastest is {inner.index(least)}, "
        f"the slowest {inner.index(most)}",
    )


PROCESS = {"pid": 1, "tid": 1}


def trace(profile: "Profile", title: str) -> str:
    """The steps as JSON in the Trace Event Format: operations nested in layers, layers in steps.

    Times are the profiled steps', concatenated: the steps without profiling between them are left out.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", **PROCESS, "args": {"name": title}}]
    start = 0.0
    for number, step in enumerate(profile.steps):
        arguments = {"tokens": step.tokens, "seconds_without_profiling": step.plain_seconds}
        events.append(_event(f"{step.phase} step {number}", "step", start, step.seconds, arguments))
        events += _inside(step, start, profile)
        start += step.seconds
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _inside(step: "ProfiledStep", start: float, profile: "Profile") -> Iterator[dict[str, Any]]:
    """Events of a step's layers and operations."""
    from ..measure.profiling import layer_spans

    for span in layer_spans(step.calls):
        name = {None: "embedding", profile.num_layers: "head"}.get(span.layer, f"layer {span.layer}")
        yield _event(name, "layer", start + span.began, span.seconds, {})
    for call in step.calls:
        arguments: dict[str, Any] = {}
        if call.cost is not None:
            arguments = call.cost._asdict() | {"floor_us": 1e6 * profile.floor_of(call)}
        yield _event(call.name, "operation", start + call.began, call.seconds, arguments)


def _event(name: str, category: str, start: float, seconds: float, arguments: dict[str, Any]) -> dict[str, Any]:
    """A complete event, in microseconds rounded to nanoseconds so that nesting is exact."""
    began, ended = round(1e9 * start), round(1e9 * (start + seconds))
    times = {"ts": began / 1e3, "dur": (ended - began) / 1e3}
    return {"ph": "X", "name": name, "cat": category, **times, **PROCESS, "args": arguments}


def as_dict(profile: "Profile", title: str) -> dict[str, Any]:
    """The output of --json: sums over all steps, in seconds, bytes and FLOPs."""
    return {
        "title": title,
        "hardware": dataclasses.asdict(profile.hardware),
        "overhead": profile.median_overhead,
        "phases": {name: _phase_as_dict(phase) for name, phase in profile.phases.items()},
    }


def _phase_as_dict(phase: "Profile") -> dict[str, Any]:
    operations = []
    for operation in phase.operations:
        entry: dict[str, Any] = {
            "place": operation.place,
            "name": operation.name,
            "calls": operation.calls,
            "seconds": operation.seconds,
        }
        if operation.cost is not None:
            entry |= {"floor": operation.floor, "ratio": operation.ratio, **operation.cost._asdict()}
        operations.append(entry)
    return {
        "steps": len(phase.steps),
        "tokens": phase.tokens,
        "seconds": phase.seconds,
        "seconds_in_operations": phase.in_operations,
        "seconds_between_operations": phase.between_operations,
        "seconds_around": phase.around,
        "floor": phase.floor,
        **phase.cost._asdict(),
        "operations": operations,
        "layers": [layer._asdict() for layer in phase.layers],
    }
