"""Figures of the commands, drawn once with matplotlib (the extra "plot") and written as a file or inside a page."""

import textwrap
import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..output_files import write_file
from .output import number_text, token_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..accounting.roofline import Analysis, Operation, Phase
    from ..profiling import Place, Profile

Draw = Callable[..., None]
"""One of the functions below: draws its data, which are named, into an empty matplotlib figure"""

COLOURS = {"ink": "#1d2129", "soft": "#667085", "line": "#e0e2e7", "prefill": "#1f6fb2", "decode": "#c0392b"}
"""A page gives them other values in its dark mode, as CSS variables of these names"""
INK, SOFT, LINE, PREFILL, DECODE = COLOURS.values()
STYLE = {
    "text.parse_math": False,  # a dollar sign in a model's name or in a token begins no formula
    "svg.fonttype": "none",  # text stays text: it can be selected and searched, and takes little space
    "svg.hashsalt": "minillm",  # the same figure has the same ids each time
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def need_matplotlib() -> None:
    """Check that figures can be drawn, before anything takes time.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("drawing needs matplotlib: pip install 'minillm[plot]'") from None


def write_figure(path: Path, draw: Draw, **data: Any) -> None:
    """Write a figure to a file in the format of its suffix, PNG without one.

    Raises:
        UsageError: the file cannot be written, matplotlib is not installed or does not support the format.
    """
    write_file(path, _render(str(path), draw, data, format=path.suffix[1:] or "png", dpi=140))


def svg(draw: Draw, **data: Any) -> str:
    """A figure as an SVG element for a page.

    Raises:
        UsageError: matplotlib is not installed.
    """
    without = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    text = _render("SVG", draw, data, format="svg", transparent=True, metadata=without).decode()
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return text[text.index("<svg") :]  # without the XML declaration


def _render(name: str, draw: Draw, data: dict[str, Any], **options: Any) -> bytes:
    need_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    content = BytesIO()
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # drawn as a box
        figure = Figure(layout="constrained")
        draw(figure, **data)
        try:
            figure.savefig(content, **options)
        except ValueError as error:  # an unknown format, or too many pixels
            raise UsageError(f"{name} cannot be written: {error}") from None
    return content.getvalue()


# --- the roofline -----------------------------------------------------------------------------------------------------

CLOSE = 1.25
"""Operations whose intensities differ by less than this factor share a circle"""
MARGIN = 0.25
"""Share of the plot's width, on either side, that holds no circle: labels are there"""
LABEL_LINE, LABEL_GAP = 0.034, 0.018
"""Height of a line of labels, and space between the labels of two circles, as shares of the plot's height"""


CIRCLES = (
    "Each circle is one or more operations, all layers together, where they meet the roof: the most that the hardware "
    "can do at their intensity. Its size and the percentages are their share of their phase's floor."
)


def circles_of(phase: "Phase") -> list[list["Operation"]]:
    """The operations with FLOPs, grouped into circles of similar intensity, in descending order of intensity."""
    circles: list[list[Operation]] = []
    for operation in sorted((one for one in phase.operations if one.flops), key=lambda one: -one.intensity):
        if circles and circles[-1][0].intensity < CLOSE * operation.intensity:
            circles[-1].append(operation)
        else:
            circles.append([operation])
    return circles


def draw_roofline(figure: Any, analysis: "Analysis", title: str = "") -> None:
    """Draw the roof and both phases' operations on it: FLOP/s against FLOPs per byte.

    Args:
        figure: an empty figure
        analysis: both phases
        title: drawn above the plot, with an explanation below it; a page has its own
    """
    from matplotlib.ticker import EngFormatter

    prefill, decode, bandwidth = analysis.prefill, analysis.decode, analysis.hardware.bandwidth
    peak, ridge = prefill.peak, prefill.ridge
    intensities = [one.intensity for phase in (prefill, decode) for one in phase.operations if one.flops]
    least, most = min(*intensities, ridge), max(*intensities, ridge)
    beside = (most / least) ** (MARGIN / (1 - 2 * MARGIN))  # the axis is logarithmic
    edges = [least / beside, ridge, most * beside]
    figure.set_size_inches(9.6, 6)
    axis = figure.subplots()
    axis.set(xscale="log", xlim=(edges[0], edges[2]), xlabel="arithmetic intensity, FLOPs per byte")
    axis.set(yscale="log", ylim=(min(peak, least * bandwidth) / 8, peak * 4), ylabel="FLOP/s")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter(EngFormatter())
    axis.minorticks_off()
    axis.grid()
    axis.plot(edges, [min(peak, one * bandwidth) for one in edges], color=INK, linewidth=1.8)
    axis.vlines(ridge, 0, peak, color=SOFT, linewidth=0.9, linestyle="--")
    bounds = f"{number_text(bandwidth)}B/s, {number_text(peak)}FLOP/s, ridge at {ridge:.0f} FLOP/byte"
    place = {"xytext": (-6, 12), "textcoords": "offset points", "ha": "right"}
    axis.annotate(bounds, (1, peak), xycoords=("axes fraction", "data"), color=SOFT, fontsize=9, **place)
    _draw_circles(axis, decode, DECODE, above=True)
    _draw_circles(axis, prefill, PREFILL, above=False)
    if title:
        axis.set_title(title, fontsize=11)
        figure.supxlabel(textwrap.fill(f"Red: decode, blue: prefill. {CIRCLES}", 120), fontsize=8, color=SOFT)


def _draw_circles(axis: Any, phase: "Phase", colour: str, *, above: bool) -> None:
    """Draw a phase's circles and their labels, in a column above the roof on the left or below it on the right.

    A line runs from each label sideways and then straight to its circle: none crosses another, since the labels are in
    descending order of intensity.
    """
    circles = circles_of(phase)
    labels = [[f"{one.name} {one.seconds / phase.seconds:.1%}" for one in circle] for circle in circles]
    heights = [len(lines) * LABEL_LINE + LABEL_GAP for lines in labels]
    y = 0.98 if above else 0.01 + sum(heights)
    for circle, lines, height in zip(circles, labels, heights, strict=True):
        intensity = max(circle, key=lambda one: one.seconds).intensity
        point = intensity, min(phase.peak, intensity * phase.hardware.bandwidth)
        share = sum(one.seconds for one in circle) / phase.seconds
        axis.scatter(*point, s=30 + 270 * share, color=colour, alpha=0.55, zorder=3)
        axis.annotate(
            "\n".join(lines),
            point,
            (0.015 if above else 0.985, y),
            textcoords="axes fraction",
            ha="left" if above else "right",
            va="top",
            color=colour,
            fontsize=9,
            arrowprops={
                "arrowstyle": "-",
                "connectionstyle": "angle,angleA=0,angleB=90,rad=4",
                "relpos": (1 if above else 0, 1 - 0.5 / len(lines)),  # beside its first line
                "color": colour,
                "linewidth": 0.6,
                "alpha": 0.6,
            },
        )
        y -= height


# --- a profile --------------------------------------------------------------------------------------------------------

PLACES: dict["Place", str] = {
    "embedding": "#7b6ca8",
    "layers": PREFILL,
    "head": "#2b8a5f",
    "outside the model": "#b8860b",
}
OUTSIDE = "#8a8a8a"


def draw_profile(figure: Any, profile: "Profile", title: str) -> None:
    """Draw the operations and layers of each phase, with their floors."""
    phases = profile.phases
    bars = max(len(phase.operations) for phase in phases.values()) + 2
    figure.set_size_inches(7.5 * len(phases), 3.6 + 0.3 * bars)
    axes = figure.subplots(2, len(phases), squeeze=False, height_ratios=[0.3 * bars, 2])
    for (name, phase), above, below in zip(phases.items(), *axes, strict=True):
        rate = f"{phase.tokens / phase.seconds:,.0f} tokens/s"
        above.set_title(f"{name}: {1e3 * phase.seconds / len(phase.steps):.2f} ms a step, {rate}", fontsize=11)
        _draw_operations(above, phase)
        _draw_layers(below, phase)
    figure.suptitle(title)
    figure.supxlabel(
        f"The floor of {profile.hardware.name}: the larger of bytes / {profile.hardware.bandwidth / 1e9:,.1f} GB/s "
        f"and FLOPs / {profile.peak / 1e9:,.0f} GFLOP/s. ×: measured over floor.",
        fontsize=8,
        color=SOFT,
    )


def _draw_operations(axis: Any, phase: "Profile") -> None:
    """A bar for each operation, with a line at its floor and their ratio."""
    bars = [(one.name, one.seconds, one.floor, PLACES[one.place]) for one in phase.operations]
    bars += [("between operations", phase.between_operations, 0.0, OUTSIDE)]
    bars += [("scheduler, strategy", phase.around, 0.0, OUTSIDE)]
    scale = 1e3 / len(phase.steps)
    for i, (_, seconds, floor, colour) in enumerate(bars):
        axis.barh(i, scale * seconds, color=colour, height=0.7)
        if floor:
            axis.vlines(scale * floor, i - 0.45, i + 0.45, color=INK, linewidth=2)
        ratio = seconds / floor if floor else 0.0
        text = f"{scale * seconds:.3f}" + (f"  {ratio:,.{0 if ratio >= 100 else 2}f} ×" if floor else "")
        end = (scale * max(seconds, floor), i)
        axis.annotate(text, end, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axis.invert_yaxis()
    axis.margins(y=0.02)
    axis.set_xlim(0, 1.3 * scale * max(max(seconds, floor) for _, seconds, floor, _ in bars))
    axis.set_xlabel("ms a step")
    for place in dict.fromkeys(one.place for one in phase.operations):
        axis.barh(0, 0, color=PLACES[place], label=place)
    axis.barh(0, 0, color=OUTSIDE, label="outside operations")
    axis.plot([], [], color=INK, linewidth=2, label="floor")
    axis.legend(fontsize=8, frameon=False, loc="lower right")


def _draw_layers(axis: Any, phase: "Profile") -> None:
    """A bar for each layer, with a line at its floor."""
    scale, names = 1e3 / len(phase.steps), []
    for i, one in enumerate(phase.layers):
        place: Place = "embedding" if one.layer is None else "head" if one.layer == phase.num_layers else "layers"
        names.append(str(one.layer) if place == "layers" else place)
        axis.bar(i, scale * one.seconds, color=PLACES[place], width=0.8)
        axis.hlines(scale * one.floor, i - 0.45, i + 0.45, color=INK, linewidth=2)
    axis.set_xticks(range(len(names)), names, fontsize=7, rotation=90 if len(names) > 20 else 0)
    axis.set(xlabel="layer", ylabel="ms a step")


# --- attention maps ---------------------------------------------------------------------------------------------------


def draw_attention(figure: Any, maps: "NDArray[np.float32]", tokens: Sequence[str], layer: int) -> None:
    """Draw the attention map of each head of a layer, queries down and keys across.

    Args:
        figure: an empty figure
        maps: [H, T, T]
        tokens: T texts
        layer: number in the title
    """
    H, T, _ = maps.shape
    columns = min(4, H)
    rows = -(-H // columns)
    size = min(max(2.2, 0.22 * T), 11)  # inches
    labelled = slice(None, None, -(-T // 100))  # at most 100 labels fit
    figure.set_size_inches(columns * size + 1, rows * size + 1)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    labels = [token_text(token) for token in tokens][labelled]
    for head, axis in enumerate(axes):
        if head >= H:
            axis.axis("off")
            continue
        image = axis.imshow(maps[head], vmin=0, vmax=1, cmap="viridis")
        axis.set_title(f"head {head}", fontsize=9)
        axis.set_xticks(range(T)[labelled], labels, rotation=90, fontsize=6)
        axis.set_yticks(range(T)[labelled], labels if head % columns == 0 else [], fontsize=6)
    figure.colorbar(image, ax=axes.tolist(), shrink=0.6, label="attention weight")
    figure.suptitle(f"Layer {layer}: how much each token (row) looks at each token before it (column)", fontsize=10)
