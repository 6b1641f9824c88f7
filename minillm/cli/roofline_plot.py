"""The roofline plot of `minillm analyze --png`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .drawing import figure_module, save
from .roofline import Group, Roof, groups_of, roof_of

if TYPE_CHECKING:
    from ..accounting.roofline import Analysis

COLOURS = {"prefill": "#1f6fb2", "decode": "#c0392b"}
LINE, GAP = 0.034, 0.02
"""Height of a label, and extra space between circles' labels, as shares of the plot's height"""
CHARACTER = 0.0092
"""Approximate width of a character, as a share of the plot's width"""


def draw(model: str, analysis: "Analysis", path: Path) -> None:
    """Draw the roofline with each operation of both phases on it.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    figure = figure_module().Figure(figsize=(9.6, 6), layout="constrained")
    axis = figure.subplots()
    phases = {"prefill": groups_of(analysis.prefill), "decode": groups_of(analysis.decode)}
    roof = roof_of(analysis, [group for groups in phases.values() for group in groups])
    _draw_roof(axis, roof)
    for name, groups in phases.items():
        _draw_groups(axis, name, groups)
    work = analysis.workload
    axis.set_title(
        f"{model} on {analysis.hardware.name}, {analysis.storage.weights}: prefill of {work.batch} x "
        f"{work.prompt_length} tokens, decode at context {work.decode_context}",
        fontsize=11,
    )
    figure.supxlabel(
        "Red: decode, blue: prefill. Each circle is one or more operations, all layers together, where they meet the "
        "roof.\nIts size and the percentages are their share of their phase's floor.",
        fontsize=8,
        color="0.35",
    )
    save(figure, path, dpi=140)


def _draw_roof(axis: Any, roof: Roof) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(roof.left, roof.right)
    axis.set_ylim(roof.bottom, roof.top)
    axis.plot(
        [roof.left, roof.ridge, roof.right],
        [roof.left * roof.bandwidth, roof.peak, roof.peak],
        color="0.15",
        linewidth=1.8,
    )
    axis.plot([roof.ridge, roof.ridge], [roof.bottom, roof.peak], color="0.5", linewidth=0.9, linestyle="--")
    axis.annotate(
        roof.title, (roof.right, roof.peak), (-4, 14), textcoords="offset points", ha="right", color="0.35", fontsize=9
    )
    axis.annotate(
        f"ridge {roof.ridge:.0f}", (roof.ridge, roof.bottom), (-4, 6), textcoords="offset points", ha="right",
        color="0.35", fontsize=9,
    )  # fmt: skip
    axis.set_xlabel("arithmetic intensity: FLOPs for each byte")
    axis.set_ylabel("FLOP/s")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_groups(axis: Any, phase: str, groups: list[Group]) -> None:
    """A phase's operations, with labels in a column: decode above the roof, prefill below it."""
    colour = COLOURS[phase]
    longest = max(len(text) for group in groups for text in group.labels)
    x, y, align = 0.015, 0.985, "left"
    start = x + CHARACTER * longest
    if phase == "prefill":
        height = sum(len(group.labels) for group in groups) * LINE + (len(groups) - 1) * GAP
        x, y, align = 0.985, 0.035 + height, "right"
        start = x - CHARACTER * longest  # common to all, so that no line crosses a label
    for group in groups:
        size = (7 + 18 * math.sqrt(group.share)) ** 2 / 2
        place, height = (group.largest.intensity, group.largest.rate), len(group.labels) * LINE
        axis.scatter(*place, s=size, color=colour, alpha=0.55, edgecolors=colour, zorder=3)
        line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6}
        axis.annotate("", place, (start, y - height / 2), textcoords="axes fraction", arrowprops=line)
        text = "\n".join(group.labels)
        axis.text(x, y, text, transform=axis.transAxes, ha=align, va="top", color=colour, fontsize=9)
        y -= height + GAP
