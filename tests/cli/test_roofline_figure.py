"""The figure of the roofline, measured in the drawing by matplotlib: on a page's width and on a phone's."""

import re
from itertools import combinations
from typing import Any

import pytest

from minillm.cli.analyze import analyze
from minillm.models import published

pytest.importorskip("matplotlib", reason="drawing needs the plot extra")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from minillm.cli.plots import NARROW, WIDE, draw_roofline

FAMILIES = sorted({name.split("-")[0]: name for name in published()}.values())


def check(model: str, inches: float, **options: Any) -> None:
    """Each operation stands in the list once; no number or line covers another or leaves the figure."""
    analysis = analyze(model, **options)
    figure = Figure(layout="constrained", dpi=144)
    draw_roofline(figure, analysis, inches=inches)
    FigureCanvasAgg(figure).draw()
    plot, names = figure.subfigs
    numbers = [text for text in plot.axes[0].texts if text.get_text().isdigit()]
    lines = [text for text in names.texts if text.get_text()]
    listed = re.findall(r"([\w.]+)\u00a0[\d.]+%", "\n".join(text.get_text() for text in lines))
    phases = analysis.phases.values()
    assert sorted(listed) == sorted(
        operation.name for phase in phases for operation in phase.operations if operation.flops
    )
    assert len(numbers) == sum(text.get_text().isdigit() for text in lines) >= 2
    edge = figure.bbox
    boxes = [text.get_window_extent() for text in [*numbers, *lines]]
    assert all(edge.x0 <= box.x0 and box.x1 <= edge.x1 and edge.y0 <= box.y0 and box.y1 <= edge.y1 for box in boxes)
    assert not [pair for pair in combinations(boxes, 2) if pair[0].padded(-0.5).overlaps(pair[1].padded(-0.5))]


@pytest.mark.parametrize("inches", [NARROW, WIDE])
def test_every_operation_can_be_read(inches: float) -> None:
    check("mixtral-8x7b", inches)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*FAMILIES[::6], *(pytest.param(name, marks=pytest.mark.exhaustive) for i, name in enumerate(FAMILIES) if i % 6)],
)
def test_those_of_every_family_can_be_read(name: str) -> None:
    check(name, NARROW, hardware="l4")
    check(name, WIDE, batch=8, hardware="h100")
