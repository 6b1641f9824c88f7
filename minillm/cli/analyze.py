"""minillm analyze: the cost of a model, from its config.json alone."""

import argparse
import inspect
from collections.abc import Callable
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ParameterError, listed
from ..output_files import check_writable
from .output import Table, as_json, bytes_text, number_text, print_report, seconds_text, write_page
from .parser import Parser
from .plots import MARKS, NARROW, WIDE, draw_roofline, need_matplotlib, svg, write_figure

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..formats.schemes import Quantization
    from ..measure.accounting.hardware import Hardware
    from ..measure.accounting.roofline import Analysis, Phase


DESCRIPTION = """Compute the cost of a model from its config.json alone: parameters, memory, and
for prefill and decode each operation's FLOPs, bytes, arithmetic intensity and
least time.

A multiply-add is two FLOPs. Attention counts the pairs of a query and a key
that the mask leaves. Bytes are those of each operation alone; "fusion saves" is
what would move in addition if biases, activations, residuals and softmax read
and wrote arrays of their own. A floor is a lower bound of the time on that
hardware, not an estimate. Of a mixture of experts a step reads those that its
tokens choose: their expected number, if each token chooses at random. Vectors
(biases, gains) and logits are float32, as in minillm."""

EPILOG = """examples:
  minillm analyze opt-13b --hardware a100
  minillm analyze facebook/opt-1.3b --batch 8 --context 1024 --dtype int8
  minillm analyze path/to/checkpoint --hardware this --png roofline.png
"""

PROMPT_LENGTH = 512


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, hub id, or a published name such as opt-13b")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    work = parser.add_argument_group("work")
    work.add_argument("--batch", type=int, default=1, metavar="N", help="sequences side by side (default: 1)")
    work.add_argument(
        "--prompt-length",
        type=int,
        metavar="N",
        help=f"tokens of each prompt (default: {PROMPT_LENGTH}, or fewer if the context is shorter)",
    )
    work.add_argument(
        "--context",
        type=int,
        metavar="S",
        help="tokens seen by a decode step, its own included (default: prompt + 1)",
    )
    machine = parser.add_argument_group("numbers and machine")
    machine.add_argument(
        "--dtype",
        default="auto",
        help="of the weights: float32, float16, bfloat16, int8, int4 (default: the model's)",
    )
    machine.add_argument(
        "--cache-dtype",
        default="auto",
        help="of the KV cache: float32, float16, bfloat16, int8 (default: as activations)",
    )
    machine.add_argument(
        "--hardware", default="a100", help="a100 (default), h100, h200, rtx4090, l4, or this: this machine, measured"
    )
    machine.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices that share each matrix")
    machine.add_argument("--pipeline-parallel", type=int, default=1, metavar="N", help="stages of layers")
    counting = parser.add_argument_group("conventions, where tools differ")
    counting.add_argument("--full-square", action="store_true", help="attention counts masked pairs too")
    counting.add_argument("--products-only", action="store_true", help="count matrix products and nothing else")
    counting.add_argument("--macs", action="store_true", help="a multiply-add is one and not two")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object, with every operation of every layer")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page with the roofline")
    output.add_argument("--png", type=Path, metavar="FILE", help="draw the roofline")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    check_writable(args.html, args.png)
    if args.png is not None or args.html is not None:
        need_matplotlib(args.png)
    analysis = analyze(**{name: getattr(args, name) for name in inspect.signature(analyze).parameters})
    if args.html is not None:
        write_page(
            args.html,
            "analyze.html",
            model=args.model,
            analysis=analysis,
            wide=svg(draw_roofline, analysis=analysis, inches=WIDE),
            narrow=svg(draw_roofline, analysis=analysis, inches=NARROW),
            marks=MARKS,
            tables=tables(analysis),
            notes=notes(analysis),
        )
    if args.png is not None:
        work, storage = analysis.workload, analysis.storage
        title = (
            f"{args.model} on {analysis.hardware.name}, {storage.weights}: prefill of {work.batch} x "
            f"{work.prompt_length} tokens" + analysis.generates * f", decode at context {work.decode_context}"
        )
        write_figure(args.png, draw_roofline, analysis=analysis, title=title)
    if args.json:
        print(as_json(as_dict(args.model, analysis)))
    else:
        print_report(report(args.model, analysis))


def analyze(
    model: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    cache_dtype: str = "auto",
    batch: int = 1,
    prompt_length: int | None = None,
    context: int | None = None,
    hardware: "str | Hardware" = "a100",
    full_square: bool = False,
    products_only: bool = False,
    macs: bool = False,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> "Analysis":
    """The analysis of a model, with arguments as the command's options; `hardware` may also be a measured processor.

    Raises:
        ModelError: the model or its config.json cannot be found.
        ParameterError: a name is unknown or a size invalid.
    """
    from ..measure.accounting import Conventions
    from ..measure.accounting.hardware import CHIPS, find_hardware
    from ..measure.accounting.roofline import Analysis, Workload
    from ..measure.accounting.storage import storage_for
    from ..parallel import Parallel

    checkpoint = find_model_config(model, revision)
    quantization = checkpoint.quantization
    if quantization is not None:
        quantization.check_dtype(dtype)
    generates = checkpoint.config.output == "tokens"
    if context is not None and not generates:
        raise ParameterError(f"--context is for a decode step, and {model} generates nothing: leave it out")
    fitting = max(1, min(PROMPT_LENGTH, checkpoint.config.max_positions - generates))
    prompt_length = fitting if prompt_length is None else prompt_length
    machine = find_hardware(hardware) if isinstance(hardware, str) else hardware
    return Analysis(
        config=checkpoint.config,
        storage=storage_for(
            (checkpoint.kept or dtype) if dtype == "auto" else dtype,
            cache_dtype,
            checkpoint=checkpoint.dtype,
            on_cpu=machine not in CHIPS.values(),
            group=quantization.group if quantization is not None else 32,
            keeps_vocabulary=quantization is not None and quantization.keeps_vocabulary and dtype == "auto",
        ),
        scheme=quantization.title if quantization is not None and quantization.published else "",
        workload=Workload(batch=batch, prompt_length=prompt_length, context=context if generates else prompt_length),
        hardware=machine,
        conventions=Conventions(full_square=full_square, products_only=products_only, multiply_add=1 if macs else 2),
        parallel=Parallel(tensor=tensor_parallel, pipeline=pipeline_parallel),
    )


class FoundConfig(NamedTuple):
    """A model's configuration and the dtype of its checkpoint."""

    config: "ModelConfig"
    dtype: str
    """Dtype of the checkpoint's tensors that are not quantised"""
    quantization: "Quantization | None" = None
    kept: str | None = None
    """The dtype in 8 or 4 bits that the checkpoint has"""


def find_model_config(model: str, revision: str | None) -> FoundConfig:
    """Find a model's configuration.

    Raises:
        ModelError: it cannot be found.
        ParameterError: the name is neither a folder, a hub id nor a published name; the message suggests some.
    """
    from ..formats import find_config, open_model
    from ..measure.accounting.storage import BYTES
    from ..models import published, published_config

    if model in published() and not Path(model).exists():
        if revision is not None:
            raise ParameterError(f"revision {revision!r} has no effect on the published name {model!r}: leave it out")
        return FoundConfig(published_config(model), "float16")
    if "/" not in model and not Path(model).exists():
        near = get_close_matches(model, published(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"published names: {listed(published())}"
        raise ParameterError(f"model {model!r} is neither a folder nor a hub id (owner/name); {hint}")
    files = open_model(find_config(model, revision=revision))
    dtype = files.dtype if files.dtype in BYTES else "float32"
    return FoundConfig(files.config, dtype, files.quantization, files.kept_dtype)


def bytes_by_format(analysis: "Analysis") -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the weights in each format, and of one token's keys and values."""
    from ..measure.accounting.memory import cache_bytes_per_token, weights_bytes
    from ..measure.accounting.storage import CACHE_FORMATS, WEIGHT_FORMATS

    config, storage = analysis.config, analysis.storage
    return (
        {
            name: weights_bytes(
                config,
                replace(storage, weights=name, keeps_vocabulary=storage.keeps_vocabulary and name == storage.weights),
            )
            for name in dict.fromkeys((*WEIGHT_FORMATS, storage.weights))
        },
        {name: cache_bytes_per_token(config, replace(storage, cache=name)) for name in CACHE_FORMATS},
    )


def as_dict(model: str, analysis: "Analysis") -> dict[str, Any]:
    """The whole analysis, for `--json`. Bytes and FLOPs are integers, times are in seconds."""
    from ..measure.accounting.memory import cache_bytes, parts_held, state_bytes_per_sequence

    storage, work, parts = analysis.storage, analysis.workload, parts_held(analysis.config, analysis.storage)
    weights, cache = bytes_by_format(analysis)
    hardware = {**asdict(analysis.hardware), "rates": dict(analysis.hardware.rates)}
    return {
        "model": model,
        "hardware": hardware,
        "storage": asdict(storage),
        "scheme": analysis.scheme or None,
        "conventions": asdict(analysis.conventions),
        "batch": work.batch,
        "prompt_length": work.prompt_length,
        "context": work.decode_context,
        "parameters": sum(part.parameters for part in parts),
        "active_parameters": sum(part.active for part in parts),
        "parameters_by_part": {part.name: part.parameters for part in parts},
        "weights_bytes": weights[storage.weights],
        "weights_bytes_by_dtype": weights,
        "kv_cache_bytes_per_token": cache[storage.cache],
        "kv_cache_bytes_per_token_by_dtype": cache,
        "kv_cache_bytes_per_sequence": cache_bytes(analysis.config, storage, work.decode_context),
        "kv_cache_bytes": cache_bytes(analysis.config, storage, work.decode_context) * work.batch,
        "state_bytes_per_sequence": state_bytes_per_sequence(analysis.config),
        "largest_batch": analysis.largest_batch,
        "largest_context": analysis.largest_context,
        "tensor_parallel": analysis.parallel.tensor,
        "pipeline_parallel": analysis.parallel.pipeline,
        "prefill": _phase(analysis, analysis.prefill),
        "decode": _phase(analysis, analysis.decode) if analysis.generates else None,
    }


def _phase(analysis: "Analysis", phase: "Phase") -> dict[str, Any]:
    from ..measure.accounting.memory import activation_bytes

    parallel, batch = analysis.parallel, analysis.workload.batch
    return {
        "flops": phase.flops,
        "bytes": phase.bytes,
        "intensity": phase.flops / phase.bytes,
        "fusion_saves": phase.fusion_saves,
        "activation_bytes": activation_bytes(analysis.config, analysis.storage, phase.tokens, batch),
        "seconds": phase.seconds,
        "tokens_per_second": phase.tokens / phase.seconds,
        "all_reduces": phase.all_reduces,
        "all_reduce_bytes": phase.message_bytes if parallel.tensor > 1 else 0,
        "all_reduce_total_bytes": analysis.all_reduce_bytes(phase),
        "all_reduce_seconds": analysis.all_reduce_seconds(phase) if parallel.tensor > 1 else 0.0,
        "stage_sends": parallel.pipeline - 1,
        "stage_bytes": phase.message_bytes if parallel.pipeline > 1 else 0,
        "stage_seconds": analysis.stage_seconds(phase) if parallel.pipeline > 1 else 0.0,
        "choice_bytes": analysis.choice_bytes(phase),
        "ops": [
            {name: value for name, value in row._asdict().items() if name != "kind"}
            | {"intensity": row.intensity, "bound": phase.bound(row), "seconds": phase.row_seconds(row)}
            for row in phase.rows
        ],
    }


# --- tables ----------------------------------------------------------------------------------------------------------


def report(model: str, analysis: "Analysis") -> list[str | Table]:
    """The whole analysis, for `print_report`."""
    storage, devices = analysis.storage, analysis.parallel.devices
    hardware = f"{devices} x {analysis.hardware.name}" if devices > 1 else analysis.hardware.name
    lines: list[str | Table] = [
        f"{model} on {hardware}: weights {storage.weights}, cache {storage.cache}, activations {storage.activations}"
    ]
    if analysis.scheme:
        lines.append(f"the checkpoint is quantised by {analysis.scheme}: read as {storage.weights}")
    for table in tables(analysis):
        lines += ["", table]
    return [*lines, "", *notes(analysis)]


def tables(analysis: "Analysis") -> list[Table]:
    """Parameters, memory, and the operations of both phases."""
    work = analysis.workload
    analysis_tables = [
        _parameters(analysis),
        _memory(analysis),
        _operations(f"prefill, {work.batch} x {work.prompt_length} tokens", analysis.prefill),
    ]
    if analysis.generates:
        analysis_tables.append(
            _operations(f"decode, {work.batch} x 1 token at context {work.decode_context}", analysis.decode)
        )
    return analysis_tables


def _parameters(analysis: "Analysis") -> Table:
    from ..measure.accounting import memory

    parts = memory.parts_held(analysis.config, analysis.storage)
    total = memory.Held("total", sum(part.parameters for part in parts), sum(part.bytes for part in parts))
    rows = [
        [part.name, f"{part.parameters:,}", f"{part.parameters / total.parameters:.1%}", bytes_text(part.bytes)]
        for part in (*parts, total)
    ]
    return Table(["part", "parameters", "share", "weights"], rows)


def _memory(analysis: "Analysis") -> Table:
    """Weights and cache in each format, and activations of both phases."""
    from ..measure.accounting.memory import (
        activation_bytes,
        cache_bytes,
        expanded_bytes_per_token,
        state_bytes_per_sequence,
    )

    work, (weights, cache) = analysis.workload, bytes_by_format(analysis)
    storages = [replace(analysis.storage, cache=name) for name in cache]
    of_text = [cache_bytes(analysis.config, storage, work.decode_context) for storage in storages]
    expanded = [size for storage in storages if (size := expanded_bytes_per_token(analysis.config, storage))]
    rows = [
        ["weights", *map(bytes_text, weights.values())],
        ["cache, a token", *map(bytes_text, cache.values())],
        *([["expanded heads", *map(bytes_text, expanded)]] if expanded else []),
        [f"cache, {work.batch} x {work.decode_context}", *(bytes_text(work.batch * size) for size in of_text)],
    ]
    activations = [
        f"{bytes_text(activation_bytes(analysis.config, analysis.storage, phase.tokens, work.batch))} in {name}"
        for name, phase in analysis.phases.items()
    ]
    state = state_bytes_per_sequence(analysis.config)
    beside = f"; state of a sequence: {bytes_text(state)}" if state else ""
    return Table(["memory", *weights], rows, note=f"activations: {', '.join(activations)}{beside}")


def _operations(title: str, phase: "Phase") -> Table:
    """One row per operation, summed over layers."""
    head = ("operation", "times", "FLOPs", "read", "written", "FLOP/byte", "bound", "floor", "share", "fusion saves")
    rows = [
        [
            operation.name,
            str(operation.calls),
            number_text(operation.flops),
            bytes_text(operation.bytes_read),
            bytes_text(operation.bytes_written),
            f"{operation.intensity:.2f}",
            operation.bound,
            seconds_text(operation.seconds),
            f"{operation.seconds / phase.seconds:.1%}",
            bytes_text(operation.fusion_saves),
        ]
        for operation in (*phase.operations, phase.total)
    ]
    rate = f"{phase.tokens / phase.seconds:,.0f} tokens/s"
    note = f"at best {seconds_text(phase.seconds)}, {rate}; the ridge lies at {phase.ridge:.0f} FLOP/byte"
    return Table(head, rows, title, note)


def notes(analysis: "Analysis") -> list[str]:
    """How much fits into memory; the experts; communication by the lecture's formulas, if on several devices."""
    from ..measure.accounting import active_parameter_count, cache_bytes, experts_read, parameter_count, weights_bytes

    work, config, parallel = analysis.workload, analysis.config, analysis.parallel
    phases = analysis.phases
    memory, longest = bytes_text(analysis.memory), analysis.largest_context
    if analysis.largest_batch:
        beyond = f" (the model takes at most {config.max_positions:,})" if longest > config.max_positions else ""
        fits = (
            f"{memory} hold {analysis.largest_batch:,} sequences of {work.decode_context:,} tokens, "
            f"or {work.batch:,} of {longest:,}{beyond}"
        )
    else:
        weights = bytes_text(weights_bytes(config, analysis.storage))
        fits = f"{memory} cannot hold one sequence of {work.decode_context:,} tokens: the weights alone take {weights}"
    lines = [fits]
    if config.num_experts:
        X, k = config.num_experts, config.experts_per_token
        experts = [f"{name} {experts_read(config, phase.tokens):.4g}" for name, phase in phases.items()]
        most = min(X, work.batch * k)
        lines.append(
            f"a token uses {k} of {X} experts, {number_text(active_parameter_count(config))} of "
            f"{number_text(parameter_count(config))} parameters; experts read in each layer, if tokens choose at "
            f"random: {', '.join(experts)} (at most {most})"
        )
    sizes = {name: phase.message_bytes for name, phase in phases.items()}
    if parallel.devices > 1:
        share = bytes_text(weights_bytes(config, analysis.storage) / parallel.devices)
        cached = bytes_text(cache_bytes(config, analysis.storage, work.decode_context) / parallel.devices)
        lines.append(
            f"each of {parallel.devices} devices has about {share} of weights, and {cached} of cache for a sequence of "
            f"{work.decode_context:,} tokens"
        )
    if parallel.tensor > 1:
        messages = [
            f"{name} {bytes_text(phase.message_bytes)} each, {bytes_text(analysis.all_reduce_bytes(phase))} in all"
            for name, phase in phases.items()
        ]
        counts = " and ".join(dict.fromkeys(str(phase.all_reduces) for phase in phases.values()))
        a_layer = "two" if config.encoder_layers else ("one", "two", "three")[config.layer_parts - 1]
        more = " (three in the decoder's)" if config.encoder_layers else ""
        lines.append(
            f"tensor parallelism over {parallel.tensor}: {counts} all-reduces, {a_layer} a layer{more} and the "
            f"embedding's; {', '.join(messages)}{_link_times(analysis, analysis.all_reduce_seconds)}"
        )
    if parallel.pipeline > 1:
        transfers = [f"{name} {bytes_text(size)}" for name, size in sizes.items()]
        lines.append(
            f"pipeline parallelism over {parallel.pipeline}: from each stage to the next in {', '.join(transfers)}"
            f"{_link_times(analysis, analysis.stage_seconds)}"
        )
    return lines


def _link_times(analysis: "Analysis", seconds_of: Callable[["Phase"], float | None]) -> str:
    """The least times of each phase's messages on the hardware's link; empty if none is known."""
    times = {name: seconds_of(phase) for name, phase in analysis.phases.items()}
    known = [f"{name} {seconds_text(seconds)}" for name, seconds in times.items() if seconds is not None]
    hardware = analysis.hardware
    return f"; by {hardware.link_name}, {hardware.link / 1e9:.0f} GB/s each way, at best {', '.join(known)}" * bool(
        known
    )
