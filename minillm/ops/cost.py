"""What an operation costs, in the algorithmic convention: each operation alone, nothing fused, nothing cached.

A multiply-add is two FLOPs. An addition, multiplication, division, comparison against a constant, square root and
exponential are one each; the search for a maximum and the moving of numbers are none. Every array that the
operation's formula names is read or written once.
"""

from typing import NamedTuple


class Cost(NamedTuple):
    """FLOPs, and bytes read and written."""

    flops: int
    bytes_read: int = 0
    bytes_written: int = 0

    def __add__(self, other: object) -> "Cost":
        assert isinstance(other, Cost)
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs for each byte moved."""
        return self.flops / (self.bytes_read + self.bytes_written)
