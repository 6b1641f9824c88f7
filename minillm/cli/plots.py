"""Figures of the commands, drawn once with matplotlib (the extra "plot") and written as a file or inside a page."""

import math
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, install, listed
from ..output_files import write_file
from ..text.display import token_text
from .output import number_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..measure.accounting.roofline import Analysis, Operation, Phase
    from ..measure.profiling import Place, Profile

Draw = Callable[..., None]
"""One of the functions below: draws its data, which are named, into an empty matplotlib figure"""

COLOURS = {"ink": "#1d1c1a", "soft": "#5f5b53", "line": "#e3dfd6", "prefill": "#1f6fb2", "decode": "#b8371f"}
COLOURS |= {"raised": "#fffffe"}  # white, apart from any other white
"""A page gives them other values in its dark mode, as CSS variables of these names"""
INK, SOFT, LINE, PREFILL, DECODE, PAPER = COLOURS.values()
HIDDEN = "#c9c5bb"
"""Hatching where attention's mask hides"""
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


def need_matplotlib(path: Path | None = None) -> None:
    """Check that figures can be drawn, and written in the format of a path, before anything takes time.

    Raises:
        UsageError: matplotlib is not installed, or does not know the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(f"drawing needs matplotlib: {install('plot')}") from None
    formats = Figure().canvas.get_supported_filetypes()
    if path is not None and (path.suffix[1:].lower() or "png") not in formats:
        raise UsageError(f"{path} cannot be written: a drawing ends in one of {listed(sorted(formats))}")


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
    text = re.sub('<g id="[^"]*">', "<g>", text)  # a page may hold two figures, and an id once
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

CLOSE, CLOSE_NARROW = 1.25, 2.45
"""Operations whose intensities differ by less than this factor share a mark; in a narrow figure"""
MARGIN = 0.12
"""Share of the plot's width, on either side, that holds no mark"""
WIDE, NARROW = 10.2, 3.7
"""Inches of a figure for a page or a file, and for a phone"""

MARKS = (
    "Each mark is one or more operations, all layers together, where they meet the roof: the most that the hardware "
    "can do at their intensity. Its size and the percentages are their share of their phase's floor."
)
LINE_INCHES = 0.17
"""Height of a line in the list of marks"""


def marks_of(phase: "Phase", close: float = CLOSE) -> list[list["Operation"]]:
    """The operations with FLOPs, grouped into marks of similar intensity, in descending order of intensity."""
    marks: list[list[Operation]] = []
    counted = [operation for operation in phase.operations if operation.flops]
    for operation in sorted(counted, key=lambda operation: -operation.intensity):
        if marks and marks[-1][-1].intensity < close * operation.intensity:
            marks[-1].append(operation)
        else:
            marks.append([operation])
    return marks


def draw_roofline(figure: Any, analysis: "Analysis", title: str = "", inches: float = WIDE) -> None:
    """Draw the roof and the phases' operations on it: FLOP/s against FLOPs per byte. A list below names the marks.

    Args:
        figure: an empty figure
        analysis: the phases
        title: drawn above the plot, with an explanation below it; a page has its own
        inches: the figure's width
    """
    from matplotlib.ticker import EngFormatter

    phases, bandwidth = analysis.phases, analysis.hardware.bandwidth
    peak, ridge = analysis.prefill.peak, analysis.prefill.ridge
    intensities = [
        operation.intensity for phase in phases.values() for operation in phase.operations if operation.flops
    ]
    least, most = min(*intensities, ridge), max(*intensities, ridge)
    beside = (most / least) ** (MARGIN / (1 - 2 * MARGIN))  # the axis is logarithmic
    edges = [least / beside, ridge, most * beside]
    size = 9 if inches > NARROW else 8
    lists = {name: _mark_list(phase, inches) for name, phase in phases.items()}
    texts = [[line for _, lines in marks for line in lines] for marks in lists.values()]
    below = LINE_INCHES * (max(map(len, texts)) if inches > NARROW else sum(map(len, texts)) + len(texts) - 1) + 0.15
    height = 5.2 if inches > NARROW else 4.2
    figure.set_size_inches(inches, height + below)
    plot, names = figure.subfigures(2, height_ratios=[height, below])
    axis = plot.subplots()
    axis.set(xscale="log", xlim=(edges[0], edges[2]))
    axis.set(yscale="log", ylim=(least * bandwidth / 20, peak * 20))
    axis.set_xlabel("arithmetic intensity, FLOPs per byte", fontsize=size)
    axis.set_title(f"FLOP/s, at most {number_text(peak)}FLOP/s", fontsize=size, loc="left")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter(EngFormatter())
    axis.minorticks_off()
    axis.tick_params(labelsize=size)
    axis.grid()
    axis.plot(edges, [min(peak, edge * bandwidth) for edge in edges], color=INK, linewidth=1.8)
    axis.vlines(ridge, 0, peak, color=SOFT, linewidth=0.9, linestyle="--")
    if title:
        figure.suptitle(textwrap.fill(title, 110), fontsize=11)
        explained = f"{'Red squares: decode; blue' if 'decode' in phases else 'Blue'} circles: prefill. {MARKS}"
        figure.supxlabel(textwrap.fill(explained, 120), fontsize=8, color=SOFT)
    offset = {"textcoords": "offset points", "fontsize": size, "color": SOFT, "ha": "right"}
    axis.annotate(f"ridge: {ridge:.0f}", (ridge, 0), (-4, 4), xycoords=("data", "axes fraction"), **offset)
    row = 1.0
    looks: dict[str, tuple[str, str, int]] = {"prefill": (PREFILL, "o", 1), "decode": (DECODE, "s", -1)}
    for column, (name, marks) in enumerate(lists.items()):
        colour, shape, side = looks[name]
        left, row = (0.02 + 0.5 * column, 1.0) if inches > NARROW else (0.02, row)  # beside or below the other phase
        for number, (group, lines) in enumerate(marks, 1):
            intensity = group[0].intensity
            point = intensity, min(peak, intensity * bandwidth)
            area = 30 + 270 * sum(operation.seconds for operation in group) / phases[name].seconds
            axis.scatter(*point, s=area, color=colour, alpha=0.55, marker=shape, zorder=3 + (side > 0))
            away = side * ((30 + 270) ** 0.5 / 2 + 0.7 * size)  # clear of the largest mark
            style = {"color": colour, "fontsize": size, "ha": "center", "va": "center"}
            axis.annotate(str(number), point, (0, away), textcoords="offset points", **style)
            names.text(left, row, str(number), color=colour, fontsize=size, va="top")
            for line in lines:
                names.text(left + 0.22 / inches, row, line, color=colour, fontsize=size, va="top")
                row -= LINE_INCHES / below
        row -= LINE_INCHES / below


def _mark_list(phase: "Phase", inches: float) -> list[tuple[list["Operation"], list[str]]]:
    """The marks of a phase by descending intensity, each with its lines in the list: operations and their shares."""
    marks = []
    for group in marks_of(phase, CLOSE if inches > NARROW else CLOSE_NARROW):
        group.sort(key=lambda operation: -operation.seconds)
        shares = [f"{operation.name}\u00a0{operation.seconds / phase.seconds:.1%}" for operation in group]
        lines = textwrap.wrap(", ".join(shares), 62 if inches > NARROW else 48, break_on_hyphens=False)
        marks.append((group, lines))
    return marks


# --- a profile --------------------------------------------------------------------------------------------------------

PLACES: dict["Place", str] = {
    "embedding": "#7b6ca8",
    "layers": PREFILL,
    "head": "#2b8a5f",
    "outside the model": "#b8860b",
}
OUTSIDE = "#8a8a8a"


def draw_profile(figure: Any, profile: "Profile", title: str) -> None:
    """Draw the operations and layers of each phase, with their floors, the phases side by side."""
    phases = profile.phases
    bars = max(len(phase.operations) for phase in phases.values()) + 2
    height = 4.2 + 0.3 * bars
    figure.set_size_inches(8.5 * len(phases), height)
    body, foot = figure.subfigures(2, height_ratios=[height - 0.6, 0.6])
    parts = body.subfigures(1, len(phases), squeeze=False, wspace=0.06)[0]
    for panel, (name, phase) in zip(parts, phases.items(), strict=True):
        above, below = panel.subplots(2, height_ratios=[0.3 * bars, 2])
        rate = f"{phase.tokens / phase.seconds:,.0f} tokens/s"
        panel.suptitle(f"{name}: {1e3 * phase.seconds / len(phase.steps):.2f} ms a step, {rate}", fontsize=11)
        _draw_operations(above, phase)
        _draw_layers(below, phase)
    body.suptitle(textwrap.fill(title, 80 * len(phases)))
    axis = parts[0].axes[0]
    axis.plot([], [], color=INK, linewidth=2, label="floor")
    handles, names = axis.get_legend_handles_labels()
    foot.legend(
        handles, names, loc="upper center", ncols=len(names) if len(phases) > 1 else 3, fontsize=8, frameon=False
    )
    floors = (
        f"The floor of {profile.hardware.name}: the larger of bytes / {profile.hardware.bandwidth / 1e9:,.1f} GB/s "
        f"and FLOPs / {profile.peak / 1e9:,.0f} GFLOP/s. ×: measured over floor."
    )
    foot.supxlabel(textwrap.fill(floors, 120), fontsize=8, color=SOFT)


def _draw_operations(axis: Any, phase: "Profile") -> None:
    """A bar for each operation, with a line at its floor; beside it, in columns, its time and the ratio of both."""
    bars = [
        (operation.name, operation.seconds, operation.floor, PLACES[operation.place]) for operation in phase.operations
    ]
    bars += [("between operations", max(0.0, phase.between_operations), 0.0, OUTSIDE)]
    bars += [("scheduler, strategy", phase.around, 0.0, OUTSIDE)]
    scale = 1e3 / len(phase.steps)
    column = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right", "va": "center"}
    axis.annotate("ms", (1, -1), (40, 0), fontsize=8, color=SOFT, **column)
    axis.annotate("×", (1, -1), (80, 0), fontsize=8, color=SOFT, **column)
    for i, (_, seconds, floor, colour) in enumerate(bars):
        axis.barh(i, scale * seconds, color=colour, height=0.7)
        axis.annotate(f"{scale * seconds:.3f}", (1, i), (40, 0), fontsize=8, **column)
        if floor:
            axis.vlines(scale * floor, i - 0.45, i + 0.45, color=INK, linewidth=2)
            axis.annotate(
                f"{seconds / floor:,.{0 if seconds / floor >= 100 else 2}f}", (1, i), (80, 0), fontsize=8, **column
            )
    axis.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_xlim(0, 1.05 * scale * max(max(seconds, floor) for _, seconds, floor, _ in bars))
    axis.set_xlabel("ms a step")
    for place in dict.fromkeys(operation.place for operation in phase.operations):
        axis.barh(0, 0, color=PLACES[place], label=place)
    axis.barh(0, 0, color=OUTSIDE, label="outside operations")


def _draw_layers(axis: Any, phase: "Profile") -> None:
    """A bar for each layer, with a line at its floor."""
    scale, names = 1e3 / len(phase.steps), []
    for i, layer in enumerate(phase.layers):
        place: Place = "embedding" if layer.layer is None else "head" if layer.layer == phase.num_layers else "layers"
        names.append(str(layer.layer) if place == "layers" else place)
        axis.bar(i, scale * layer.seconds, color=PLACES[place], width=0.8)
        axis.hlines(scale * layer.floor, i - 0.45, i + 0.45, color=INK, linewidth=2)
    axis.set_xticks(range(len(names)), names, fontsize=7, rotation=90)
    axis.set(xlabel="layer", ylabel="ms a step")


# --- attention maps ---------------------------------------------------------------------------------------------------


def with_glyphs(text: str) -> str:
    r"""A text with escapes such as `\u65e5` for characters that matplotlib's font would draw as boxes."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    return "".join(c if font.get_char_index(ord(c)) else c.encode("unicode_escape").decode() for c in text)


POWER = 1 / 3
"""A colour is at this power of a weight between 0 and 1: in a long prompt most weights are small"""
TICKS = (0, 0.001, 0.01, 0.1, 1)
PIXELS = 512
"""Rows and columns of a map at most; each shows the largest weight of several where a prompt is longer"""
COLOUR_MAP = "viridis"


def pooled(maps: "NDArray[np.float32]", masked: "NDArray[np.bool_]") -> tuple["NDArray[np.float32]", int]:
    """Maps of at most `PIXELS` rows and columns, NaN where the mask hides, and how many tokens a pixel stands for.

    [H, T, T], [T, T] -> [H, t, t]
    """
    import numpy as np

    from ..measure.pictures import downsampled

    blocks, size = downsampled(np.where(masked, np.float32(-np.inf), maps), PIXELS)
    return np.where(np.isneginf(blocks), np.nan, blocks), size


def map_image(pixels: "NDArray[np.float32]") -> bytes:
    """A map as PNG, transparent where it is NaN. [t, t] -> bytes"""
    import numpy as np
    from matplotlib import colormaps
    from PIL import Image  # which matplotlib requires

    levels = np.where(np.isnan(pixels), 255, np.rint(254 * np.clip(np.nan_to_num(pixels), 0, 1) ** POWER))
    colours = np.rint(255 * colormaps[COLOUR_MAP](np.linspace(0, 1, 255))[:, :3]).astype(np.uint8)
    image, content = Image.fromarray(levels.astype(np.uint8)), BytesIO()
    image.putpalette([*colours.ravel().tolist(), 255, 255, 255])
    image.save(content, "PNG", transparency=255, optimize=True)
    return content.getvalue()


def colour_stops() -> list[str]:
    """Colours from weight 0 to 1, at equal distances on the scale."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps[COLOUR_MAP](i / 16)) for i in range(17)]


def draw_attention(
    figure: Any,
    maps: "NDArray[np.float32]",
    masked: "NDArray[np.bool_]",
    tokens: Sequence[str],
    layer: int,
    head: int = 0,
) -> None:
    """Draw the attention map of one head large and the others' small, queries down and keys across.

    Args:
        figure: an empty figure
        maps: [H, T, T]
        masked: True for pairs of a query and a key that the mask hides; [T, T]
        tokens: T texts
        layer: number in the title
        head: the one that is large
    """
    from matplotlib import colormaps
    from matplotlib.colors import PowerNorm

    H, T, _ = maps.shape
    pixels, size = pooled(maps, masked)
    others = [number for number in range(H) if number != head]
    columns = max(1, math.ceil(math.sqrt(len(others) / 2)))  # twice as high as wide
    rows = max(1, -(-len(others) // columns))
    look = {"norm": PowerNorm(POWER, 0, 1), "cmap": colormaps[COLOUR_MAP], "extent": (-0.5, T - 0.5, T - 0.5, -0.5)}
    figure.set_size_inches(13, 8)
    left, right = figure.subfigures(1, 2, width_ratios=(8.6, 4.4))
    axis = left.subplots()
    image = axis.imshow(pixels[head], interpolation="nearest", **look)
    axis.set_title(f"head {head}", fontsize=10)
    labelled = slice(None, None, -(-T // 60))  # at most 60 labels fit
    labels = [token_text(token, 12) for token in tokens][labelled]
    axis.set_xticks(range(T)[labelled], labels, rotation=90, fontsize=7)
    axis.set_yticks(range(T)[labelled], labels, fontsize=7)
    small = right.subplots(rows, columns, squeeze=False).ravel()
    for number, other in zip_longest(others, small):
        other.axis("off") if number is None else other.imshow(pixels[number], **look)
        other.set(xticks=[], yticks=[])
        other.set_title("" if number is None else f"head {number}", fontsize=7, pad=2)
    for drawn in (axis, *small[: len(others)]):
        drawn.patch.set(facecolor=PAPER, edgecolor=HIDDEN, hatch="////", linewidth=0)
    bar = left.colorbar(image, ax=axis, shrink=0.5, ticks=TICKS, format="%g", location="right")
    bar.set_label("attention weight; hatched: hidden by the mask", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    pooling = f"; a pixel: the largest of {size} x {size}" if size > 1 else ""
    figure.suptitle(
        f"Layer {layer}: how much each token (row) looks at each token before it (column){pooling}", fontsize=11
    )
