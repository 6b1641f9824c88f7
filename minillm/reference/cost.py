"""What an operation costs, in the algorithmic convention: each operation alone, nothing fused, nothing cached.

A multiply-add is two FLOPs, and a sum of n numbers is n additions. An addition, multiplication, division, comparison
against a constant, square root, exponential, power, sine, cosine and hyperbolic tangent are one each; a change of sign,
the search for a maximum and the moving of numbers are none. Arithmetic on integers (ids, positions) is none either.
What a mask hides is not counted, though a backend may compute it before hiding it. Every array that the operation's
formula names is read or written once; ids hold 8 bytes. What numbers take depends on who runs the operation, so costs
are told: `number_bytes` of an activation, and of weights and cache what is stored.
"""

from typing import NamedTuple


class Cost(NamedTuple):
    """FLOPs, and bytes read and written."""

    flops: int
    bytes_read: int = 0
    bytes_written: int = 0
    fusion_saves: int = 0
    """Bytes that would move besides, were each step of the operation one of its own: a bias, an activation and a
    residual behind their product, attention's scores between its two"""

    def __add__(self, other: object) -> "Cost":
        """Both together, field by field; a tuple's own `+` would lay them end to end."""
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(*(ours + theirs for ours, theirs in zip(self, other, strict=True)))

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs for each byte moved."""
        return self.flops / (self.bytes_read + self.bytes_written)
