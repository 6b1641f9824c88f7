"""What the pictures of `minillm analyze` show: the roof, and each operation on it."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .analyze import lines_of, number_text

if TYPE_CHECKING:
    from ..accounting.roofline import Analysis, Phase


CLOSE = 1.25
"""Operations whose intensities differ by less than this factor share a circle"""


class Point(NamedTuple):
    """An operation, all its layers together."""

    name: str
    intensity: float
    """FLOPs for each byte"""
    rate: float
    """FLOP/s of the roof above it"""
    share: float
    """Of the phase's floor"""


class Roof(NamedTuple):
    """The picture's axes and its roof: FLOP/s against FLOPs for each byte."""

    peak: float
    bandwidth: float
    left: float
    right: float
    bottom: float
    top: float

    @property
    def ridge(self) -> float:
        """Where both bounds meet."""
        return self.peak / self.bandwidth

    @property
    def title(self) -> str:
        """Both bounds in words."""
        return f"{number_text(self.peak)}FLOP/s, {number_text(self.bandwidth)}B/s"


class Group(NamedTuple):
    """Operations that lie so close together that one circle stands for them."""

    points: list[Point]

    @property
    def share(self) -> float:
        """Of the phase's floor, together."""
        return sum(point.share for point in self.points)

    @property
    def largest(self) -> Point:
        """The one that takes longest; it says where the circle stands."""
        return max(self.points, key=lambda point: point.share)

    @property
    def labels(self) -> list[str]:
        """A line for each: its name and its share of the phase's floor."""
        return [f"{p.name} {p.share:.0%}" if p.share >= 0.005 else f"{p.name} < 1%" for p in self.points]


def groups_of(phase: "Phase") -> list[Group]:
    """The operations that compute something, those of the highest intensity first."""
    points = [
        Point(one.name, one.intensity, roof_at(phase, one.intensity), one.seconds / phase.seconds)
        for one in lines_of(phase)
        if one.flops
    ]
    groups: list[Group] = []
    for point in sorted(points, key=lambda point: -point.intensity):
        if groups and groups[-1].points[0].intensity < CLOSE * point.intensity:
            groups[-1].points.append(point)
        else:
            groups.append(Group([point]))
    return groups


def idle(phase: "Phase") -> list[str]:
    """Operations that only move bytes, and have no place on the picture."""
    return [one.name for one in lines_of(phase) if not one.flops]


def roof_at(phase: "Phase", intensity: float) -> float:
    """FLOP/s that the hardware can reach at an intensity."""
    return min(phase.peak, intensity * phase.hardware.bandwidth)


def roof_of(analysis: "Analysis", groups: Sequence[Group]) -> Roof:
    """Axes of whole powers of ten around all points and the ridge."""
    phase = analysis.prefill
    found = [group.largest.intensity for group in groups]
    left = 10.0 ** math.floor(math.log10(min(found)) - 0.2)
    right = 10.0 ** math.ceil(math.log10(max(*found, 2 * phase.ridge)) + 0.2)
    bandwidth = phase.hardware.bandwidth
    return Roof(phase.peak, bandwidth, left, right, left * bandwidth / 2, phase.peak * 3)
