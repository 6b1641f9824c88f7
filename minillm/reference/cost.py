"""The cost of an operation in the algorithmic convention: each operation alone, nothing fused, nothing cached.

A multiply-add is two FLOPs, and a sum of n numbers is n additions. An addition, multiplication, division, comparison
against a constant, square root, exponential, power, sine, cosine and hyperbolic tangent count as one each; negation,
maximum, data movement and integer arithmetic (ids, positions) as none. Masked scores are not counted, though a backend
may compute them. Every array in the operation's formula is read or written once; ids have 8 bytes. The size of a number
depends on the backend, so cost functions take it as an argument: `number_bytes` of an activation, and the stored bytes
of weights and cache.
"""

from typing import NamedTuple


class Cost(NamedTuple):
    """FLOPs, bytes read and bytes written."""

    flops: int
    bytes_read: int = 0
    bytes_written: int = 0
    fusion_saves: int = 0
    """Additional bytes moved if each step ran separately: bias, activation and residual after their product,
    attention's scores between its two products"""

    def __add__(self, other: object) -> "Cost":
        """The sum, field by field; a tuple's own `+` would concatenate."""
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(*(ours + theirs for ours, theirs in zip(self, other, strict=True)))

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte moved."""
        return self.flops / (self.bytes_read + self.bytes_written)
