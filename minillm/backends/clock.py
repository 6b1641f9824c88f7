"""Moments within a forward pass, as the device that computes can tell them."""

import time
from typing import Any, NamedTuple, Protocol


class Clock(Protocol):
    """Marks moments, and says later how far apart they were.

    On a CPU an operation has ended when its call returns, so a mark is the host's time. A GPU works behind its host:
    a mark there is an event in the stream, and `seconds` waits until both have come to pass.
    """

    def mark(self) -> Any:
        """This moment, after all that was asked for before."""

    def seconds(self, began: Any, ended: Any) -> float:
        """Seconds from one mark to another."""


class HostClock:
    """The host's own clock, for backends that compute within the call."""

    def mark(self) -> int:
        """Nanoseconds from some moment in the past."""
        return time.perf_counter_ns()

    def seconds(self, began: int, ended: int) -> float:
        """Seconds from one mark to another."""
        return (ended - began) / 1e9


class Moments(NamedTuple):
    """When the launches of a pass ended that was recorded before."""

    step: object
    """What was recorded: the same object each time"""
    began: Any
    """A mark of the backend's clock"""
    ended: Any
    """A mark for each launch; None where the pass has just been recorded"""
