"""What the pictures of `minillm analyze` show: the roof, and each operation on it."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .analyze_tables import lines_of, number_text

if TYPE_CHECKING:
    from ..accounting.roofline import Analysis, Phase


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


def points_of(phase: "Phase") -> list[Point]:
    """The operations that compute something, the one of the highest intensity first."""
    points = [
        Point(one.name, one.intensity, roof_at(phase, one.intensity), one.seconds / phase.seconds)
        for one in lines_of(phase)
        if one.flops
    ]
    return sorted(points, key=lambda point: -point.intensity)


def idle(phase: "Phase") -> list[str]:
    """Operations that only move bytes, and have no place on the picture."""
    return [one.name for one in lines_of(phase) if not one.flops]


def roof_at(phase: "Phase", intensity: float) -> float:
    """FLOP/s that the hardware can reach at an intensity."""
    return min(phase.peak, intensity * phase.hardware.bandwidth)


def roof_of(analysis: "Analysis", points: Sequence[Point]) -> Roof:
    """Axes of whole powers of ten around all points and the ridge."""
    phase = analysis.prefill
    found = [point.intensity for point in points]
    left = 10.0 ** math.floor(math.log10(min(found)) - 0.2)
    right = 10.0 ** math.ceil(math.log10(max(*found, 2 * phase.ridge)) + 0.2)
    bandwidth = phase.hardware.bandwidth
    return Roof(phase.peak, bandwidth, left, right, left * bandwidth / 2, phase.peak * 3)


def label(point: Point) -> str:
    """Name and share of the phase's time."""
    return f"{point.name} {point.share:.0%}" if point.share >= 0.005 else f"{point.name} < 1%"
