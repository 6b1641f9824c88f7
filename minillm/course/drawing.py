"""Figures of the lessons, in the notebook's own colours.

A figure shows itself as an SVG element whose text and lines have the colour of the notebook's text, so that light and
dark notebooks both do.
"""

import io
import re
from collections.abc import Iterator
from typing import Any

from ..errors import install

INK = "#123456"
"""The colour that stands for the notebook's own; no drawing has it otherwise"""
BLUE, ORANGE, GREEN, PURPLE = "#3b82c4", "#dd8a24", "#3c9a5f", "#9a6fc0"
"""Colours that are told apart on white and on black"""


def drawing(width: float = 7, height: float = 3.2, columns: int = 1, title: str = "") -> tuple[Any, Any]:
    """An empty figure of matplotlib, sizes in inches, and its axes: one, or an array of `columns`.

    Without matplotlib, a stand-in for both: the lesson goes on without its figures.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        return (missing := Undrawn(title)), missing

    class Drawing(Figure):
        """A figure that a notebook shows as SVG."""

        def _repr_html_(self) -> str:
            for axis in self.axes:  # colour bars too, which the lesson has added
                _in_ink(axis)
            content = io.StringIO()
            with mpl.rc_context({"svg.fonttype": "none"}):
                self.savefig(content, format="svg", transparent=True)
            text = content.getvalue()
            return re.sub(INK, "currentColor", text[text.index("<svg") :])

        def __repr__(self) -> str:
            return f"[a figure, drawn in Jupyter: {self.get_suptitle()}]"

    figure = Drawing(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=11, color=INK)
    axes = figure.subplots(1, columns)
    for axis in [axes] if columns == 1 else axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


class Undrawn:
    """Stands for a figure and all of its parts where matplotlib is missing: takes any call, and draws nothing."""

    def __init__(self, title: str) -> None:
        self._title = title

    def __getattr__(self, name: str) -> "Undrawn":
        if name.startswith("_"):  # how a notebook would show it
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> "Undrawn":
        return self

    def __getitem__(self, _: object) -> "Undrawn":
        return self

    def __iter__(self) -> Iterator["Undrawn"]:
        yield self

    def __repr__(self) -> str:
        return f"[a figure, drawn with matplotlib ({install('plot')}): {self._title}]"


def _in_ink(axis: Any) -> None:
    """Give an axis the notebook's colour: its lines, ticks, titles and legend."""
    axis.patch.set_alpha(0)
    axis.tick_params(which="both", colors=INK)
    for spine in axis.spines.values():
        spine.set_edgecolor(INK)
    texts = [axis.title, axis.xaxis.label, axis.yaxis.label]
    if (legend := axis.get_legend()) is not None:
        legend.get_frame().set(alpha=0)
        texts += legend.get_texts()
    for text in texts:
        text.set_color(INK)
