"""Labels of the marks in a figure: each beside its mark, without overlaps, with a line to it where it is not close.

A label tries places around its mark, nearest first. All lengths are in points (1/72 inch).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

Point = tuple[float, float]

DISTANCES = (3, 8, 14, 22, 32, 44, 58, 74, 92, 112, 136, 164, 200, 240, 290)
"""From a mark to its label"""
CLOSE = 8
"""A label no further away needs no line"""
TURNS = tuple(sign * angle for angle in range(0, 180, 15) for sign in (1, -1))
"""Degrees from the direction that a label prefers"""
SPACE = 2
"""Between a label and all else"""
TRIALS = sorted(
    ((far, turn) for far in DISTANCES for turn in TURNS),
    key=lambda trial: trial[0] + abs(trial[1]) / 6 + 50 * (abs(trial[1]) > 75),  # rather on its own side of the line
)
"""Distance and turn of the places of a label, the best first"""
LINE = 1.35
"""Height of a line, relative to the size of its letters"""


TALLEST = 3
"""Height over width beyond which a figure does not grow"""


class Mark(NamedTuple):
    """A mark, and its label to be placed."""

    point: Point
    """In the coordinates of the data"""
    radius: float
    lines: Sequence[str]
    colour: str
    direction: float
    """Of the label, if it can be chosen: degrees, counterclockwise from the right"""


class Box(NamedTuple):
    """A rectangle."""

    left: float
    bottom: float
    right: float
    top: float

    def grown(self, by: float) -> "Box":
        """The rectangle with a margin."""
        return Box(self.left - by, self.bottom - by, self.right + by, self.top + by)

    def meets(self, other: "Box") -> bool:
        """True if they overlap."""
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def nearest(self, point: Point) -> Point:
        """The point of the rectangle that is nearest to another."""
        return min(max(point[0], self.left), self.right), min(max(point[1], self.bottom), self.top)

    def cut_by(self, start: Point, end: Point) -> bool:
        """True if a line runs through it (Liang and Barsky, ACM Transactions on Graphics 3(1), 1984)."""
        enters, leaves = 0.0, 1.0
        for low, high, a, b in ((self.left, self.right, start[0], end[0]), (self.bottom, self.top, start[1], end[1])):
            if a == b:
                if not low < a < high:
                    return False
                continue
            near, far = sorted(((low - a) / (b - a), (high - a) / (b - a)))
            enters, leaves = max(enters, near), min(leaves, far)
        return enters < leaves


class Place(NamedTuple):
    """A place of a label."""

    box: Box
    leader: tuple[Point, Point] | None
    """The line from the label to its mark, if it has one"""

    def allows(self, other: "Place") -> bool:
        """True if neither label covers the other or its line, and their lines do not cross."""
        box, leader = self.box.grown(SPACE), self.leader
        if box.meets(other.box) or (other.leader and box.cut_by(*other.leader)):
            return False
        return not leader or not (
            other.box.grown(SPACE).cut_by(*leader) or (other.leader and cross(leader, other.leader))
        )


def cross(one: tuple[Point, Point], other: tuple[Point, Point]) -> bool:
    """True if two lines cross."""
    (a, b), (c, d) = one, other

    def side(p: Point, q: Point, r: Point) -> float:
        return (q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0])

    return side(a, b, c) * side(a, b, d) < 0 and side(c, d, a) * side(c, d, b) < 0


def place_labels(axis: Any, marks: Sequence[Mark], line: Sequence[Point], size: float, paper: str) -> None:
    """Draw the labels of marks; the figure grows in height until all fit.

    Args:
        axis: of matplotlib, with all else that it shows
        marks: those to be labelled
        line: a line that runs through the marks, in the coordinates of the data; no label lies on it
        size: of the letters
        paper: colour behind them
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure, scale = axis.figure, 72 / axis.figure.dpi
    renderer = FigureCanvasAgg(figure).get_renderer()

    def points_of(given: Iterable[Point]) -> list[Point]:
        return [(scale * x, scale * y) for x, y in map(axis.transData.transform, given)]

    def box_of(artist: Any) -> Box:
        return Box(*(scale * edge for edge in artist.get_window_extent(renderer).extents))

    figure.draw_without_rendering()
    sizes = []
    for mark in marks:
        probes = [axis.text(0, 0, text, fontsize=size, transform=None) for text in mark.lines]
        sizes.append((max(box_of(one).right - box_of(one).left for one in probes), LINE * size * len(probes)))
        for one in probes:
            one.remove()
    found: list[Place] | None = None
    while found is None:
        figure.draw_without_rendering()
        points, bounds = points_of(mark.point for mark in marks), box_of(axis).grown(-2 * SPACE)
        rounds = [Box(x, y, x, y).grown(mark.radius) for (x, y), mark in zip(points, marks, strict=True)]
        texts = [box_of(text).grown(SPACE) for text in axis.texts]
        parts = list(pairwise(points_of(line)))
        choices = []
        for mark, point, extent in zip(marks, points, sizes, strict=True):
            others = [*texts, *(one for one in rounds if not one.meets(Box(*point, *point).grown(1)))]
            around = list(_places(point, mark.radius, extent, mark.direction, bounds))
            free = [
                place
                for place in around
                if not any(place.box.grown(SPACE).meets(other) for other in (*texts, *rounds))
                and not any(place.box.grown(SPACE).cut_by(*part) for part in parts)
                and not (place.leader and any(other.cut_by(*place.leader) for other in others))
            ]
            choices.append(free or around)
        found = _plan(choices)
        width, height = figure.get_size_inches()
        if found is None and height > TALLEST * width:
            found = [places[0] for places in choices]  # labels that overlap are better than none
        elif found is None:
            figure.set_size_inches(width, 1.15 * height)
    for mark, point, place in zip(marks, points, found, strict=True):
        _draw(axis, mark, point, place, size, paper)


def _draw(axis: Any, mark: Mark, point: Point, place: Place, size: float, paper: str) -> None:
    """Draw a label line by line: a page's other font then moves no line away from its mark."""
    box, style = place.box, {"color": mark.colour, "fontsize": size, "textcoords": "offset points"}
    behind = {
        "boxstyle": "square,pad=0.1",
        "facecolor": paper,
        "edgecolor": "none",
    }  # no line of the grid shows through
    if place.leader is not None:
        end = place.leader[0]
        arrow = {"arrowstyle": "-", "shrinkA": 0, "shrinkB": mark.radius, "color": mark.colour, "linewidth": 0.8}
        axis.annotate("", mark.point, (end[0] - point[0], end[1] - point[1]), arrowprops=arrow, **style)
    before = box.left + box.right < 2 * point[0]
    across = (box.right if before else box.left) - point[0]
    for number, text in enumerate(mark.lines):
        up = box.top - (number + 0.5) * LINE * size - point[1]
        axis.annotate(
            text, mark.point, (across, up), ha="right" if before else "left", va="center_baseline", bbox=behind, **style
        )


def _plan(choices: Sequence[Sequence[Place]]) -> list[Place] | None:
    """A place of each label, chosen one after the other; None if not all find one.

    A label that finds none goes before the others in another attempt. At last each moves where it is better off among
    all the others.
    """
    order = sorted(range(len(choices)), key=lambda i: len(choices[i]))
    for _ in range(4 * len(order)):
        placed: dict[int, Place] = {}
        for i in order:
            found = next((one for one in choices[i] if all(one.allows(other) for other in placed.values())), None)
            if found is None:
                order.remove(i)
                order.insert(0, i)
                break
            placed[i] = found
        else:
            for i in [*order, *order]:
                others = [place for number, place in placed.items() if number != i]
                placed[i] = next(one for one in choices[i] if all(one.allows(other) for other in others))
            return [placed[i] for i in range(len(choices))]
    return None


def _places(point: Point, radius: float, size: Point, direction: float, bounds: Box) -> Iterator[Place]:
    """Places around a mark and inside the bounds, the best first."""
    (x, y), (width, height) = point, size
    for distance, turn in TRIALS:
        angle = math.radians(direction + turn)
        across, up = math.cos(angle), math.sin(angle)
        left = x + (radius + distance) * across + width / 2 * (max(-1.0, min(1.0, 1.5 * across)) - 1)
        bottom = y + (radius + distance) * up + height / 2 * (max(-1.0, min(1.0, 1.5 * up)) - 1)
        left = max(bounds.left, min(left, bounds.right - width))
        bottom = max(bounds.bottom, min(bottom, bounds.top - height))
        box = Box(left, bottom, left + width, bottom + height)
        end = box.nearest(point)
        yield Place(box, (end, point) if math.dist(end, point) > radius + CLOSE else None)
