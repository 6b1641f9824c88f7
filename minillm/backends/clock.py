"""Clocks of backends: the host's, and what a device's has in common with it."""

import time
from typing import Any, NamedTuple, Protocol


class Clock(Protocol):
    """Records points in time, and measures the seconds between them.

    On a CPU an operation has ended when its call returns, so a mark is the host's time. A GPU runs asynchronously: a
    mark is an event in its stream, and `seconds` waits for both events.
    """

    def mark(self) -> Any:
        """Record the point in time at which all work queued so far is done."""

    def seconds(self, began: Any, ended: Any) -> float:
        """Seconds from one mark to another."""


class HostClock:
    """The host's clock, for backends that compute within the call."""

    def mark(self) -> int:
        """Nanoseconds since an arbitrary point in the past."""
        return time.perf_counter_ns()

    def seconds(self, began: int, ended: int) -> float:
        """Seconds from one mark to another."""
        return (ended - began) / 1e9


class Moments(NamedTuple):
    """End times of the launches of a recorded pass."""

    step: object
    """The recorded step: the same object each time"""
    began: Any
    """A mark of the backend's clock"""
    ended: Any
    """A mark for each launch; None where the pass has just been recorded"""
