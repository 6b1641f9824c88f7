"""Data of the roofline plots of `minillm analyze`: the roof, and each operation on it."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .analyze import lines_of, number_text

if TYPE_CHECKING:
    from ..accounting.roofline import Analysis, Phase


CLOSE = 1.25
"""Operations whose intensities differ by less than this factor share a circle"""


class Point(NamedTuple):
    """An operation, summed over layers."""

    name: str
    intensity: float
    """FLOPs per byte"""
    rate: float
    """FLOP/s of the roof at its intensity"""
    share: float
    """Share of the phase's floor"""


class Roof(NamedTuple):
    """The plot's axes and roof: FLOP/s against FLOPs per byte."""

    peak: float
    bandwidth: float
    left: float
    right: float
    bottom: float
    top: float

    @property
    def ridge(self) -> float:
        """Intensity at which both bounds are equal, in FLOPs per byte."""
        return self.peak / self.bandwidth

    @property
    def title(self) -> str:
        """Both bounds as text."""
        return f"{number_text(self.peak)}FLOP/s, {number_text(self.bandwidth)}B/s"


class Group(NamedTuple):
    """Operations of similar intensity, drawn as one circle."""

    points: list[Point]

    @property
    def share(self) -> float:
        """Their share of the phase's floor."""
        return sum(point.share for point in self.points)

    @property
    def largest(self) -> Point:
        """The one that takes longest, where the circle is drawn."""
        return max(self.points, key=lambda point: point.share)

    @property
    def labels(self) -> list[str]:
        """Name and share of the phase's floor of each operation."""
        return [f"{p.name} {p.share:.0%}" if p.share >= 0.005 else f"{p.name} < 1%" for p in self.points]


def groups_of(phase: "Phase") -> list[Group]:
    """The operations with FLOPs, in groups of descending intensity."""
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
    """Operations that only move bytes and are not in the plot."""
    return [one.name for one in lines_of(phase) if not one.flops]


def roof_at(phase: "Phase", intensity: float) -> float:
    """Attainable FLOP/s at an intensity."""
    return min(phase.peak, intensity * phase.hardware.bandwidth)


def roof_of(analysis: "Analysis", groups: Sequence[Group]) -> Roof:
    """The roof, with axes from and to powers of ten around all points and the ridge."""
    phase = analysis.prefill
    found = [group.largest.intensity for group in groups]
    left = 10.0 ** math.floor(math.log10(min(found)) - 0.2)
    right = 10.0 ** math.ceil(math.log10(max(*found, 2 * phase.ridge)) + 0.2)
    bandwidth = phase.hardware.bandwidth
    return Roof(phase.peak, bandwidth, left, right, left * bandwidth / 2, phase.peak * 3)
