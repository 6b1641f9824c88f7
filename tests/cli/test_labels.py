"""Labels in the roofline: measured in the drawing by matplotlib, on a page's width and on a phone's."""

import math
from itertools import combinations
from typing import Any

import pytest

from minillm.cli.analyze import analyze
from minillm.cli.main import build_parser
from minillm.models import published

pytest.importorskip("matplotlib", reason="drawing needs the plot extra")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.transforms import Bbox

from minillm.cli.plots import NARROW, WIDE, draw_roofline

DPI = 144


def check(arguments: list[str], inches: float) -> None:
    """No label overlaps another, a mark, the roof or the edge; lines from labels to marks cross nothing."""
    figure = Figure(layout="constrained", dpi=DPI)
    draw_roofline(figure, analyze(build_parser().parse_args(["analyze", *arguments])), inches=inches)
    FigureCanvasAgg(figure).draw()
    [axis] = figure.axes
    assert figure.get_size_inches()[0] == inches
    assert figure.get_size_inches()[1] <= 4 * inches
    labels = {text: Bbox(text.get_window_extent().padded(-0.5)) for text in axis.texts if text.get_text()}
    assert len(labels) > 6
    for (one, box), (other, beyond) in combinations(labels.items(), 2):
        assert not box.overlaps(beyond), f"{one} covers {other}"
    for text, box in labels.items():
        inside = axis.get_window_extent()
        assert inside.containsx(box.x0) and inside.containsx(box.x1), text
        assert inside.containsy(box.y0) and inside.containsy(box.y1), text
    roof = Path(axis.transData.transform(axis.lines[0].get_xydata()))
    marks = [mark for mark in axis.collections if isinstance(mark, PathCollection)]
    for text, box in labels.items():
        assert not roof.intersects_bbox(box, filled=False), text
        assert not any(box.overlaps(extent_of(axis, mark)) for mark in marks), text
    leaders = [text for text in axis.texts if getattr(text, "arrow_patch", None) is not None]
    ends = {one: [tuple(end) for end in ends_of(axis, one)] for one in leaders}
    for one, other in combinations(leaders, 2):
        assert not crosses(ends[one], ends[other])
    for one in leaders:
        line = Path(ends[one])
        assert not [text for text, box in labels.items() if line.intersects_bbox(box.padded(-1), filled=False)]


def ends_of(axis: Any, leader: Any) -> tuple[Any, Any]:
    """In pixels, where a line begins and ends."""
    end = axis.transData.transform(leader.xy)
    return end + [DPI / 72 * each for each in leader.xyann], end


def extent_of(axis: Any, mark: Any) -> Bbox:
    x, y = axis.transData.transform(mark.get_offsets()[0])
    radius = math.sqrt(mark.get_sizes()[0]) / 2 * DPI / 72
    return Bbox([[x - radius, y - radius], [x + radius, y + radius]])


def crosses(one: list[Any], other: list[Any]) -> bool:
    """Two segments have a point in common that is the end of neither: from the equations of both lines."""
    (ax, ay), (bx, by) = one
    (cx, cy), (dx, dy) = other
    below = (bx - ax) * (dy - cy) - (by - ay) * (dx - cx)
    if not below:
        return False
    along = ((cx - ax) * (dy - cy) - (cy - ay) * (dx - cx)) / below
    across = ((cx - ax) * (by - ay) - (cy - ay) * (bx - ax)) / below
    return 0.001 < along < 0.999 and 0.001 < across < 0.999


@pytest.mark.parametrize("inches", [NARROW, pytest.param(WIDE, marks=pytest.mark.slow)])
def test_labels_can_be_read(inches: float) -> None:
    check(["opt-13b"], inches)


@pytest.mark.parametrize(("inches", "batch", "hardware"), [(NARROW, 1, "l4"), (WIDE, 8, "h100")])
@pytest.mark.parametrize(
    "every", [pytest.param(12, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.exhaustive)]
)
def test_labels_of_families_can_be_read(every: int, inches: float, batch: int, hardware: str) -> None:
    """Other families in the pictures of one width than in those of the other."""
    families = {name.split("-")[0]: name for name in published()}
    for name in list(families.values())[inches == WIDE :: every]:
        check([name, "--batch", str(batch), "--hardware", hardware], inches)
