"""minillm analyze: the cost of a model, from its config.json alone."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ParameterError
from ..output_files import write_file
from .terminal import as_json

if TYPE_CHECKING:
    from ..accounting.roofline import Analysis, Phase
    from ..config import ModelConfig
    from ..models.quantized import Quantization


DESCRIPTION = """What a model takes, from its config.json alone: parameters, memory, and for prefill
and decode each operation's FLOPs, bytes, arithmetic intensity and least time.

A multiply-add is two FLOPs. Attention counts the pairs of a query and a key that
it may see. Bytes are those of each operation alone; "fusion saves" is what would
move besides if biases, activations, residuals and softmax read and wrote arrays
of their own. A floor is what no run can beat on that hardware, not what one
reaches. Vectors (biases, gains) and logits are float32, as minillm keeps them."""

EPILOG = """examples:
  minillm analyze opt-13b --hardware a100
  minillm analyze facebook/opt-1.3b --batch 8 --context 1024 --dtype int8
  minillm analyze path/to/checkpoint --hardware this --png roofline.png
"""

PROMPT_LENGTH = 512


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "analyze",
        help="what a model costs, from its config.json alone",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="folder, hub id, or a published name such as opt-13b")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    work = parser.add_argument_group("work")
    work.add_argument("--batch", type=int, default=1, metavar="N", help="sequences side by side (default: 1)")
    work.add_argument(
        "--prompt-length",
        type=int,
        metavar="N",
        help=f"of each (default: {PROMPT_LENGTH}, or what the model has room for)",
    )
    work.add_argument(
        "--context", type=int, metavar="S", help="that a decode step sees, its token included (default: prompt + 1)"
    )
    machine = parser.add_argument_group("numbers and machine")
    machine.add_argument(
        "--dtype", default="auto", help="of weights: float32, float16, bfloat16, int8, int4 (default: the model's own)"
    )
    machine.add_argument(
        "--cache-dtype", default="auto", help="float32, float16, bfloat16, int8 (default: that of activations)"
    )
    machine.add_argument(
        "--hardware", default="a100", help="a100 (default), h100, h200, rtx4090, l4, or this: the machine at hand"
    )
    machine.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices that share each matrix")
    machine.add_argument("--pipeline-parallel", type=int, default=1, metavar="N", help="stages of layers")
    counting = parser.add_argument_group("conventions, where tools differ")
    counting.add_argument("--full-square", action="store_true", help="attention counts hidden pairs too")
    counting.add_argument("--products-only", action="store_true", help="count matrix products and nothing else")
    counting.add_argument("--macs", action="store_true", help="a multiply-add is one and not two")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object, with every operation of every layer")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page with the roofline")
    output.add_argument("--png", type=Path, metavar="FILE", help="draw the roofline")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.png is not None:
        from .drawing import figure_module

        figure_module()
    analysis = analyze(args)
    if args.html is not None:
        from .roofline_page import page

        write_file(args.html, page(args.model, analysis))
    if args.png is not None:
        from .roofline_plot import draw

        draw(args.model, analysis, args.png)
    if args.json:
        print(as_json(as_dict(args.model, analysis)))
    else:
        print("\n".join(tables(args.model, analysis)))


def analyze(args: argparse.Namespace) -> "Analysis":
    """The analysis that the command line asks for.

    Raises:
        ModelError: the model or its config.json cannot be found.
        ParameterError: a name is unknown or a size invalid.
    """
    from ..accounting import Conventions
    from ..accounting.roofline import Analysis, Parallel, Workload
    from ..accounting.storage import storage_for
    from ..hardware import THIS, find_hardware

    found = find_config(args.model, args.revision)
    if found.quantization is not None:
        found.quantization.check_wanted(args.dtype)
    kept = found.quantization.dtype if found.quantization is not None and args.dtype == "auto" else args.dtype
    fitting = max(1, min(PROMPT_LENGTH, found.config.max_positions - 1))
    prompt_length = fitting if args.prompt_length is None else args.prompt_length
    return Analysis(
        config=found.config,
        storage=storage_for(
            kept,
            args.cache_dtype,
            checkpoint=found.dtype,
            on_cpu=args.hardware == THIS,
            group=found.quantization.group if found.quantization is not None else 32,
        ),
        workload=Workload(batch=args.batch, prompt_length=prompt_length, context=args.context),
        hardware=find_hardware(args.hardware),
        conventions=Conventions(
            full_square=args.full_square, products_only=args.products_only, multiply_add=1 if args.macs else 2
        ),
        parallel=Parallel(tensor=args.tensor_parallel, pipeline=args.pipeline_parallel),
    )


class Found(NamedTuple):
    """A model's configuration and the dtype of its checkpoint."""

    config: "ModelConfig"
    dtype: str
    """Dtype of the checkpoint's tensors that are not quantised"""
    quantization: "Quantization | None" = None


def find_config(model: str, revision: str | None) -> Found:
    """Find a model's configuration.

    Raises:
        ModelError: it cannot be found.
        ParameterError: the name is neither a folder, a hub id nor a published name; the message lists those.
    """
    from ..accounting.storage import BYTES
    from ..checkpoint import find_config as folder_of
    from ..config import read_config
    from ..models import family_of, published, published_config
    from ..models.quantized import read_quantization

    if model in published() and not Path(model).exists():
        if revision is not None:
            raise ParameterError(f"revision {revision!r} has no effect on the published name {model!r}: leave it out")
        return Found(published_config(model), "float16")
    if "/" not in model and not Path(model).exists():
        raise ParameterError(
            f"model {model!r} is neither a folder nor a hub id (owner/name); published names: " + ", ".join(published())
        )
    raw = read_config(folder_of(model, revision=revision))
    config: ModelConfig = family_of(raw).read_config(raw)
    stored = raw.get("dtype") or raw.get("torch_dtype")
    return Found(config, stored if stored in BYTES else "float32", read_quantization(raw))


def as_dict(model: str, analysis: "Analysis") -> dict[str, Any]:
    """The whole analysis, for `--json`. Bytes and FLOPs are integers, times are in seconds."""
    from dataclasses import asdict, replace

    from ..accounting import memory
    from ..accounting.storage import CACHE_FORMATS, WEIGHT_FORMATS

    config, storage, work = analysis.config, analysis.storage, analysis.workload
    weights = {name: memory.weights_bytes(config, replace(storage, weights=name)) for name in WEIGHT_FORMATS}
    cache = {name: memory.cache_bytes_per_token(config, replace(storage, cache=name)) for name in CACHE_FORMATS}
    parts = memory.parts_held(config, storage)
    hardware = {**asdict(analysis.hardware), "rates": dict(analysis.hardware.rates)}
    return {
        "model": model,
        "hardware": hardware,
        "storage": asdict(storage),
        "conventions": asdict(analysis.conventions),
        "batch": work.batch,
        "prompt_length": work.prompt_length,
        "context": work.decode_context,
        "parameters": sum(part.parameters for part in parts),
        "parameters_by_part": {part.name: part.parameters for part in parts},
        "weights_bytes": weights[storage.weights],
        "weights_bytes_by_dtype": weights,
        "kv_cache_bytes_per_token": cache[storage.cache],
        "kv_cache_bytes_per_token_by_dtype": cache,
        "kv_cache_bytes_per_sequence": cache[storage.cache] * work.decode_context,
        "kv_cache_bytes": cache[storage.cache] * work.decode_context * work.batch,
        "largest_batch": analysis.largest_batch,
        "largest_context": analysis.largest_context,
        "tensor_parallel": analysis.parallel.tensor,
        "pipeline_parallel": analysis.parallel.pipeline,
        "prefill": _phase(analysis, analysis.prefill),
        "decode": _phase(analysis, analysis.decode),
    }


def _phase(analysis: "Analysis", phase: "Phase") -> dict[str, Any]:
    from ..accounting.memory import activation_bytes

    parallel, L = analysis.parallel, analysis.config.num_layers
    batch = analysis.workload.batch
    return {
        "flops": phase.flops,
        "bytes": phase.bytes,
        "intensity": phase.flops / phase.bytes,
        "fusion_saves": phase.fusion_saves,
        "activation_bytes": activation_bytes(analysis.config, analysis.storage, phase.tokens, batch),
        "seconds": phase.seconds,
        "tokens_per_second": phase.tokens / phase.seconds,
        "all_reduces": 2 * L if parallel.tensor > 1 else 0,
        "all_reduce_bytes": phase.message_bytes if parallel.tensor > 1 else 0,
        "stage_sends": parallel.pipeline - 1,
        "stage_bytes": phase.message_bytes if parallel.pipeline > 1 else 0,
        "ops": [
            {
                "name": row.name,
                "layer": row.layer,
                "flops": row.flops,
                "bytes_read": row.bytes_read,
                "bytes_written": row.bytes_written,
                "intensity": row.intensity,
                "bound": phase.bound(row),
                "fusion_saves": row.fusion_saves,
                "seconds": phase.row_seconds(row),
            }
            for row in phase.rows
        ],
    }


# --- tables ----------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One operation, summed over layers."""

    name: str
    layers: int
    flops: int
    read: int
    written: int
    fusion_saves: int
    bound: str
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / (self.read + self.written) if self.read + self.written else 0.0


def lines_of(phase: "Phase") -> list[Line]:
    """A phase's operations, in the order of their first call."""
    lines: dict[str, Line] = {}
    for row in phase.rows:
        seconds = phase.row_seconds(row)
        old = lines.get(row.name, Line(row.name, 0, 0, 0, 0, 0, phase.bound(row), 0.0))
        lines[row.name] = Line(
            row.name,
            old.layers + 1,
            old.flops + row.flops,
            old.read + row.bytes_read,
            old.written + row.bytes_written,
            old.fusion_saves + row.fusion_saves,
            old.bound,
            old.seconds + seconds,
        )
    return list(lines.values())


def tables(model: str, analysis: "Analysis") -> list[str]:
    """The whole analysis as lines of text."""
    storage, work = analysis.storage, analysis.workload
    head = [
        f"{model} on {_count(analysis.parallel.devices, analysis.hardware.name)}: weights {storage.weights}, "
        f"cache {storage.cache}, activations {storage.activations}",
        "",
    ]
    prefill = f"prefill, {work.batch} x {work.prompt_length} tokens"
    decode = f"decode, {work.batch} x 1 token at context {work.decode_context}"
    return [
        *head,
        *_parameters(analysis),
        "",
        *_memory(analysis),
        "",
        *_phase_table(prefill, analysis.prefill),
        "",
        *_phase_table(decode, analysis.decode),
        "",
        *_fits(analysis),
        *_communication(analysis),
    ]


def _parameters(analysis: "Analysis") -> list[str]:
    from ..accounting import memory

    parts = memory.parts_held(analysis.config, analysis.storage)
    total = memory.Held("total", sum(part.parameters for part in parts), sum(part.bytes for part in parts))
    lines = [f"{'part':<24}{'parameters':>18}{'share':>9}{'weights':>12}"]
    for part in (*parts, total):
        share = f"{part.parameters / total.parameters:.1%}"
        lines.append(f"{part.name:<24}{part.parameters:>18,}{share:>9}{bytes_text(part.bytes):>12}")
    return lines


def _memory(analysis: "Analysis") -> list[str]:
    from ..accounting import memory
    from ..accounting.storage import CACHE_FORMATS, WEIGHT_FORMATS

    """Weights and cache in each format, and activations of both phases."""

    config, storage, work = analysis.config, analysis.storage, analysis.workload
    lines = [f"{'memory':<24}" + "".join(f"{name:>12}" for name in WEIGHT_FORMATS)]
    weights = [memory.weights_bytes(config, replace(storage, weights=name)) for name in WEIGHT_FORMATS]
    token = [memory.cache_bytes_per_token(config, replace(storage, cache=name)) for name in CACHE_FORMATS]
    rows = {
        "weights": weights,
        "cache, a token": token,
        f"cache, {work.batch} x {work.decode_context}": [work.batch * work.decode_context * one for one in token],
    }
    lines += [f"{name:<24}" + "".join(f"{bytes_text(one):>12}" for one in row) for name, row in rows.items()]
    alive = [
        memory.activation_bytes(config, storage, phase.tokens, work.batch)
        for phase in (analysis.prefill, analysis.decode)
    ]
    return [*lines, f"activations: {bytes_text(alive[0])} in prefill, {bytes_text(alive[1])} in decode"]


def _phase_table(title: str, phase: "Phase") -> list[str]:
    """One line per operation, summed over layers."""
    columns = ("times", "FLOPs", "read", "written", "FLOP/byte", "bound", "floor", "fusion saves")
    widths = (7, 10, 11, 11, 11, 9, 11, 14)
    lines = [title, f"{'operation':<24}" + "".join(f"{c:>{w}}" for c, w in zip(columns, widths, strict=True))]
    operations = lines_of(phase)
    total = Line(
        "total",
        sum(one.layers for one in operations),
        phase.flops,
        sum(one.read for one in operations),
        sum(one.written for one in operations),
        phase.fusion_saves,
        "",
        phase.seconds,
    )
    for one in (*operations, total):
        cells = (
            str(one.layers),
            number_text(one.flops),
            bytes_text(one.read),
            bytes_text(one.written),
            f"{one.intensity:.2f}",
            one.bound,
            seconds_text(one.seconds),
            bytes_text(one.fusion_saves),
        )
        lines.append(f"{one.name:<24}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))
    rate = phase.tokens / phase.seconds
    lines.append(
        f"at best {seconds_text(phase.seconds)}, {rate:,.0f} tokens/s; the ridge lies at {phase.ridge:.0f} FLOP/byte"
    )
    return lines


def _fits(analysis: "Analysis") -> list[str]:
    from ..accounting import memory

    work, config = analysis.workload, analysis.config
    if not analysis.largest_batch:
        weights = bytes_text(memory.weights_bytes(config, analysis.storage))
        return [
            f"into {bytes_text(analysis.memory)} fits not one sequence of {work.decode_context:,} tokens: the weights "
            f"alone take {weights}"
        ]
    longest = analysis.largest_context
    beyond = f", of which the model has {config.max_positions:,}" if longest > config.max_positions else ""
    return [
        f"into {bytes_text(analysis.memory)} fit {analysis.largest_batch:,} sequences of {work.decode_context:,} "
        f"tokens, or {work.batch:,} of {longest:,}{beyond}"
    ]


def _communication(analysis: "Analysis") -> list[str]:
    """Communication by the lecture's formulas, if there is more than one device."""
    L, parallel = analysis.config.num_layers, analysis.parallel
    phases = {"prefill": analysis.prefill, "decode": analysis.decode}
    lines = []
    if parallel.tensor > 1:
        each = ", ".join(
            f"{name} {bytes_text(phase.message_bytes)} each, {bytes_text(2 * L * phase.message_bytes)} in all"
            for name, phase in phases.items()
        )
        lines.append(f"tensor parallelism over {parallel.tensor}: {2 * L} all-reduces, two a layer; {each}")
    if parallel.pipeline > 1:
        each = ", ".join(f"{name} {bytes_text(phase.message_bytes)}" for name, phase in phases.items())
        lines.append(f"pipeline parallelism over {parallel.pipeline}: from each stage to the next in {each}")
    return lines


def _count(devices: int, name: str) -> str:
    return name if devices == 1 else f"{devices} x {name}"


def number_text(value: float) -> str:
    """A number with four digits and an SI prefix."""
    for power, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            scaled = value / power
            return f"{scaled:.{3 if scaled < 10 else 2 if scaled < 100 else 1}f} {unit}"
    return f"{value:.0f}"


def bytes_text(value: float) -> str:
    """Bytes with an SI prefix: 1 GB is 10^9 bytes."""
    text = number_text(value)
    return f"{text}B" if " " in text else f"{text} B"


def seconds_text(value: float) -> str:
    """Seconds in s, ms, us or ns."""
    for power, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= power:
            return f"{value / power:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
