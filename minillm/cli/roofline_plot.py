"""The picture of `minillm analyze --png`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .roofline import Point, Roof, label, points_of, roof_of

if TYPE_CHECKING:
    from ..accounting.roofline import Analysis

COLOURS = {"prefill": "#1f6fb2", "decode": "#c0392b"}


def check_matplotlib() -> Any:
    """The module that draws.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError:
        raise UsageError("drawing needs matplotlib: pip install 'minillm[plot]'") from None
    return matplotlib.figure


def draw(model: str, analysis: "Analysis", path: Path) -> None:
    """Draw the roofline with each operation of both phases on it.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    figure = check_matplotlib().Figure(figsize=(9.6, 6), layout="constrained")
    axis = figure.subplots()
    phases = {"prefill": points_of(analysis.prefill), "decode": points_of(analysis.decode)}
    roof = roof_of(analysis, [point for points in phases.values() for point in points])
    _draw_roof(axis, roof)
    for name, points in phases.items():
        _draw_points(axis, name, points)
    work = analysis.workload
    axis.set_title(
        f"{model} on {analysis.hardware.name}, {analysis.storage.weights}: prefill of {work.batch} x "
        f"{work.prompt_length} tokens, decode at context {work.decode_context}",
        fontsize=11,
    )
    figure.supxlabel(
        "Each circle is one operation, all layers together, where it meets the roof; its size and the percentage are "
        "its share of its phase's floor.",
        fontsize=8,
        color="0.35",
    )
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be written: {error}") from None


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
        roof.title, (roof.right, roof.peak), (-4, 6), textcoords="offset points", ha="right", color="0.35", fontsize=9
    )
    axis.annotate(
        f"ridge {roof.ridge:.0f}", (roof.ridge, roof.bottom), (-4, 6), textcoords="offset points", ha="right",
        color="0.35", fontsize=9,
    )  # fmt: skip
    axis.set_xlabel("arithmetic intensity: FLOPs for each byte")
    axis.set_ylabel("FLOP/s")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_points(axis: Any, phase: str, points: list[Point]) -> None:
    """A phase's operations, with labels in a column: decode above the roof, prefill below it."""
    colour = COLOURS[phase]
    for i, point in enumerate(points):
        size = (7 + 18 * math.sqrt(point.share)) ** 2
        axis.scatter(point.intensity, point.rate, s=size / 2, color=colour, alpha=0.55, edgecolors=colour, zorder=3)
        if phase == "decode":
            where, align = (0.015, 0.965 - i * 0.036), "left"
        else:
            where, align = (0.985, 0.06 + (len(points) - 1 - i) * 0.036), "right"
        axis.annotate(
            label(point), (point.intensity, point.rate), where, textcoords="axes fraction", ha=align, va="center",
            color=colour, fontsize=9, arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6},
        )  # fmt: skip
    top = 0.965 + 0.0 if phase == "decode" else 0.06 + len(points) * 0.036
    x, align = (0.015, "left") if phase == "decode" else (0.985, "right")
    y = top - len(points) * 0.036 if phase == "decode" else top
    axis.text(
        x, y, f"{phase}, share of its floor", transform=axis.transAxes, ha=align, va="center", fontsize=8, color="0.35"
    )
