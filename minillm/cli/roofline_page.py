"""The HTML page of `minillm analyze`, self-contained: the roofline as SVG, and the tables."""

import math
import re
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from .. import __version__
from .analyze import bytes_text, lines_of, number_text, seconds_text, tables
from .roofline import Group, Roof, groups_of, idle, roof_of

if TYPE_CHECKING:
    from ..accounting.roofline import Analysis, Phase

WIDTH, HEIGHT = 960, 600
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 16, 52
"""Margins of the plot, in pixels"""
LINE, GAP = 18, 12
"""Height of a label, and extra space between circles' labels, in pixels"""
CHARACTER = 7
"""Approximate width of a character in pixels"""


def page(model: str, analysis: "Analysis") -> str:
    """The whole page as HTML."""
    template = Template(Path(__file__).with_name("roofline.html").read_text(encoding="utf-8"))
    work, phases = analysis.workload, {"prefill": analysis.prefill, "decode": analysis.decode}
    moves = sorted({name for phase in phases.values() for name in idle(phase)})
    return template.substitute(
        model=escape(model),
        hardware=escape(analysis.hardware.name),
        storage=f"{analysis.storage.weights} weights, {analysis.storage.cache} cache",
        source=escape(analysis.hardware.source),
        batch=work.batch,
        prompt=f"{work.prompt_length:,}",
        context=f"{work.decode_context:,}",
        summary="".join(_summary(name, phase) for name, phase in phases.items()),
        svg=draw(analysis),
        moves=escape(", ".join(moves)),
        operations="".join(_table(name, phase) for name, phase in phases.items()),
        text=escape("\n".join(tables(model, analysis))),
        version=__version__,
    )


def _summary(name: str, phase: "Phase") -> str:
    """A phase's summary in one line."""
    return (
        f'<li class="{name}"><i></i><b>{name}</b> {number_text(phase.flops)}FLOP, {bytes_text(phase.bytes)}, '
        f"{phase.flops / phase.bytes:.4g} FLOP/byte: at best {seconds_text(phase.seconds)}, "
        f"{phase.tokens / phase.seconds:,.0f} tokens/s</li>"
    )


def _table(name: str, phase: "Phase") -> str:
    """The table of a phase's operations."""
    rows = "".join(
        f"<tr><td>{escape(one.name)}</td><td>{one.layers}</td><td>{number_text(one.flops)}</td>"
        f"<td>{bytes_text(one.read)}</td><td>{bytes_text(one.written)}</td><td>{one.intensity:.2f}</td>"
        f"<td>{one.bound}</td><td>{seconds_text(one.seconds)}</td><td>{one.seconds / phase.seconds:.1%}</td>"
        f"<td>{bytes_text(one.fusion_saves)}</td></tr>"
        for one in lines_of(phase)
    )
    heads = ("operation", "times", "FLOPs", "read", "written", "FLOP/byte", "bound", "floor", "share", "fusion saves")
    head = "".join(f"<th>{one}</th>" for one in heads)
    return f'<h2>{name}</h2><div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


def draw(analysis: "Analysis") -> str:
    """The roofline as an SVG element, with both phases' operations on the roof."""
    phases = {"prefill": groups_of(analysis.prefill), "decode": groups_of(analysis.decode)}
    roof = roof_of(analysis, [group for groups in phases.values() for group in groups])
    parts = [*_axes(roof), _roof(roof)]
    for name, groups in phases.items():
        parts += _groups(name, groups, roof)
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="roofline">{body}</svg>'


def place(roof: Roof, intensity: float, rate: float) -> tuple[float, float]:
    """Pixel coordinates of a point."""
    x = (math.log10(intensity / roof.left)) / math.log10(roof.right / roof.left)
    y = (math.log10(rate / roof.bottom)) / math.log10(roof.top / roof.bottom)
    return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)


def _axes(roof: Roof) -> list[str]:
    """Grid lines at powers of ten, with labels."""
    parts = []
    for power in range(round(math.log10(roof.left)), round(math.log10(roof.right)) + 1):
        x, y = place(roof, 10.0**power, roof.bottom)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{10.0**power:g}</text>')
    for power in range(math.ceil(math.log10(roof.bottom)), math.floor(math.log10(roof.top)) + 1):
        x, y = place(roof, roof.left, 10.0**power)
        parts.append(f'<path class="grid" d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="tick" x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{_round(10.0**power)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="tick" x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">'
        "arithmetic intensity: FLOPs for each byte</text>"
    )
    parts.append(
        f'<text class="tick" transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">FLOP/s</text>'
    )
    return parts


def _round(value: float) -> str:
    """A power of ten as text, without trailing zeros."""
    return re.sub(r"\.0+ ", " ", number_text(value))


def _roof(roof: Roof) -> str:
    """Lines of both bounds."""
    points = [
        place(roof, roof.left, roof.left * roof.bandwidth),
        place(roof, roof.ridge, roof.peak),
        place(roof, roof.right, roof.peak),
    ]
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    x, y = points[2]
    ridge, _ = points[1]
    return (
        f'<path class="roof" d="{line}"/>'
        f'<text class="tick" x="{x - 6:.1f}" y="{y - 20:.1f}" text-anchor="end">{roof.title}</text>'
        f'<path class="ridge" d="M{ridge:.1f} {y:.1f}V{HEIGHT - BOTTOM}"/>'
        f'<text class="tick" x="{ridge - 6:.1f}" y="{HEIGHT - BOTTOM - 8}" text-anchor="end">{roof.ridge:.0f}</text>'
    )


def _groups(phase: str, groups: list[Group], roof: Roof) -> list[str]:
    """A phase's operations, with labels in a column: decode above the roof, prefill below it."""
    lines = sum(len(group.labels) for group in groups)
    y = TOP + 16.0
    edge, anchor, inward = LEFT + 12, "start", 1
    if phase == "prefill":
        y = HEIGHT - BOTTOM - 26.0 - (lines - 1) * LINE - (len(groups) - 1) * GAP
        edge, anchor, inward = WIDTH - RIGHT - 10, "end", -1
    longest = max(len(text) for group in groups for text in group.labels)
    start = edge + inward * (8 + CHARACTER * longest)  # common to all, so that no line crosses a label
    parts = []
    for group in groups:
        labels = group.labels
        px, py = place(roof, group.largest.intensity, group.largest.rate)
        parts.append(
            f'<path class="leader" d="M{start:.0f} {y - 4 + (len(labels) - 1) * LINE / 2:.0f}L{px:.1f} {py:.1f}"/>'
        )
        shown = "; ".join(f"{p.name}: {p.intensity:.4g} FLOP/byte, {p.share:.1%}" for p in group.points)
        radius = 3.5 + 9 * math.sqrt(group.share)
        parts.append(
            f'<circle class="{phase}" cx="{px:.1f}" cy="{py:.1f}" r="{radius:.1f}"><title>{phase}: {escape(shown)}'
            "</title></circle>"
        )
        for text in labels:
            parts.append(f'<text class="{phase}" x="{edge}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>')
            y += LINE
        y += GAP
    return parts
