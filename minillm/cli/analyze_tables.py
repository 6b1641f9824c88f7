"""The tables of `minillm analyze`."""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..accounting import memory
from ..accounting.storage import CACHE_FORMATS, WEIGHT_FORMATS

if TYPE_CHECKING:
    from ..accounting.roofline import Analysis, Phase


class Line(NamedTuple):
    """One operation, all its layers together."""

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
        """FLOPs for each byte."""
        return self.flops / (self.read + self.written) if self.read + self.written else 0.0


def lines_of(phase: "Phase") -> list[Line]:
    """A phase's operations in the order they first run."""
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
    """All of it, as lines of text."""
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
        *_phase(prefill, analysis.prefill),
        "",
        *_phase(decode, analysis.decode),
        "",
        *_fits(analysis),
        *_communication(analysis),
    ]


def _parameters(analysis: "Analysis") -> list[str]:
    parts = memory.parts_held(analysis.config, analysis.storage)
    total = memory.Held("total", sum(part.parameters for part in parts), sum(part.bytes for part in parts))
    lines = [f"{'part':<20}{'parameters':>18}{'share':>9}{'weights':>12}"]
    for part in (*parts, total):
        share = f"{part.parameters / total.parameters:.1%}"
        lines.append(f"{part.name:<20}{part.parameters:>18,}{share:>9}{bytes_text(part.bytes):>12}")
    return lines


def _memory(analysis: "Analysis") -> list[str]:
    """Weights and cache in each format, and activations of both phases."""
    config, storage, work = analysis.config, analysis.storage, analysis.workload
    lines = [f"{'memory':<20}" + "".join(f"{name:>12}" for name in WEIGHT_FORMATS)]
    weights = [memory.weights_bytes(config, replace(storage, weights=name)) for name in WEIGHT_FORMATS]
    token = [memory.cache_bytes_per_token(config, replace(storage, cache=name)) for name in CACHE_FORMATS]
    rows = {
        "weights": weights,
        "cache, a token": token,
        f"cache, {work.batch} x {work.decode_context}": [work.batch * work.decode_context * one for one in token],
    }
    lines += [f"{name:<20}" + "".join(f"{bytes_text(one):>12}" for one in row) for name, row in rows.items()]
    alive = [
        memory.activation_bytes(config, storage, phase.tokens, work.batch)
        for phase in (analysis.prefill, analysis.decode)
    ]
    return [*lines, f"activations: {bytes_text(alive[0])} in prefill, {bytes_text(alive[1])} in decode"]


def _phase(title: str, phase: "Phase") -> list[str]:
    """One line for each operation, all layers together."""
    columns = ("times", "FLOPs", "read", "written", "FLOP/byte", "bound", "floor", "fusion saves")
    widths = (7, 10, 11, 11, 11, 9, 11, 14)
    lines = [title, f"{'operation':<20}" + "".join(f"{c:>{w}}" for c, w in zip(columns, widths, strict=True))]
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
        lines.append(f"{one.name:<20}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))
    rate = phase.tokens / phase.seconds
    lines.append(
        f"at best {seconds_text(phase.seconds)}, {rate:,.0f} tokens/s; the ridge lies at {phase.ridge:.0f} FLOP/byte"
    )
    return lines


def _fits(analysis: "Analysis") -> list[str]:
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
    """The lecture's formulas, where there is more than one device."""
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
    """Four digits and a power of a thousand."""
    for power, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            scaled = value / power
            return f"{scaled:.{3 if scaled < 10 else 2 if scaled < 100 else 1}f} {unit}"
    return f"{value:.0f}"


def bytes_text(value: float) -> str:
    """Powers of a thousand: 1 GB is 10^9 bytes."""
    text = number_text(value)
    return f"{text}B" if " " in text else f"{text} B"


def seconds_text(value: float) -> str:
    """Seconds in a fitting unit."""
    for power, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= power:
            return f"{value / power:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
