"""Time on the GPU, for `gpu.py`: between two events, of a captured graph where host calls would be in the way."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minillm.backends.cuda.compiling import CupyLauncher
from minillm.backends.cuda.device import CupyDevice
from minillm.backends.cuda.kernels import Kernels

Call = Callable[[], object]


class Sizes(NamedTuple):
    """How much is measured."""

    batches: tuple[int, ...] = (1, 8, 64)
    prompt: int = 128
    """Tokens before a decode step is timed"""
    new_tokens: int = 128
    """Generated at most; with the prompt they stay within one bucket of 256 positions"""
    steps: int = 64
    prefill: int = 2000
    """Tokens of a prompt"""
    prefills: int = 4
    """Prompts in one pass"""
    context: int = 1024
    """Positions in the cache when attention is timed alone"""
    window: int = 256
    """Of these, the last that a query sees where it has a window"""
    copy: int = 4 << 30
    """Bytes that the copy reads"""
    product: int = 8192
    cold: int = 512 << 20
    """Bytes that launches of one kernel read in turn, so that no cache holds them"""
    repeats: int = 11


TINY = Sizes(
    batches=(1, 3), prompt=5, new_tokens=30, steps=3, prefill=20, prefills=2, context=40, window=24,
    copy=1 << 16, product=64, cold=1 << 14, repeats=2,
)  # fmt: skip
"""For a run without a GPU, which only shows that everything runs."""


class Clock:
    """The GPU, its kernels for 16-bit numbers, and what they take."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.device = CupyDevice()
        self.device.activate()
        self.xp = self.device.xp
        self.kernels = Kernels(CupyLauncher(), "float16")

    def singly(self, call: Call) -> list[float]:
        """Seconds of each of some calls, host and all; for what takes much longer than its launch."""
        call()
        return [self._time(call) for _ in range(self.sizes.repeats)]

    def captured(self, calls: Sequence[Call]) -> list[float]:
        """Seconds of one launch, when `calls`, each one launch or a few, are captured one after the other.

        Give calls that read different memory: what lies in a cache says nothing about a forward pass.
        """
        calls[0]()  # compiles

        def launch() -> None:
            for call in calls:
                call()

        replay = self.device.record(launch)
        replay()
        return [self._time(replay) / len(calls) for _ in range(self.sizes.repeats)]

    def copies(self, size: int, least: int = 2) -> int:
        """How many calls that read `size` bytes each it takes to read more than a cache holds."""
        return max(least, min(64, -(-self.sizes.cold // max(1, size))))

    def _time(self, call: Call) -> float:
        start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
        start.record(self.device.stream)
        call()
        stop.record(self.device.stream)
        self.device.wait()
        return float(1e-3 * self.xp.cuda.get_elapsed_time(start, stop))


def median_and_best(seconds: Sequence[float]) -> dict[str, Any]:
    """Fields of a `Figure`."""
    return {"seconds": statistics.median(seconds), "best": min(seconds)}
