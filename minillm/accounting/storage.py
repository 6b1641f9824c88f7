"""Bytes per number: weights in each format, K/V cache, activations.

Derived from the formats' descriptions (`reference/quantize.py`, `backends/weights.py`), not from arrays; tests check
that both agree.
"""

from dataclasses import dataclass

from ..backends.formats import Role
from ..errors import ParameterError

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number"""
BITS = {"int8": 8, "int4": 4}
"""Bits of a number in a group that shares a scale of 2 bytes"""
WEIGHT_FORMATS = (*BYTES, *BITS)
CACHE_FORMATS = (*BYTES, "int8")
ID_BYTES = 8
"""Bytes of a token id or a position"""
VECTOR_BYTES = 4
"""Bytes of a number in a bias or gain, and of a logit: always float32"""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Formats of weights, cache and activations."""

    weights: str = "float32"
    """Matrices: one of `WEIGHT_FORMATS`"""
    cache: str = "float32"
    """Keys and values: one of `CACHE_FORMATS`"""
    activations: str = "float32"
    """Results of operations: a key of `BYTES`"""
    checkpoint: str = "float32"
    """The position table if weights have 8 or 4 bits: a key of `BYTES`"""
    group: int = 32
    """Weights that share a scale"""

    def __post_init__(self) -> None:
        """Check the formats.

        Raises:
            ParameterError: a format is unknown; the message lists the known ones.
        """
        for name, value, known in (
            ("dtype", self.weights, WEIGHT_FORMATS),
            ("cache_dtype", self.cache, CACHE_FORMATS),
            ("activation_dtype", self.activations, tuple(BYTES)),
            ("checkpoint dtype", self.checkpoint, tuple(BYTES)),
        ):
            if value not in known:
                raise ParameterError(f"{name} {value!r} is not known: expected one of {', '.join(known)}")

    @classmethod
    def all_in(cls, dtype: str) -> "Storage":
        """Weights, cache and activations in one dtype, as on a GPU."""
        return cls(weights=dtype, cache=dtype, activations=dtype, checkpoint=dtype)

    def row_bytes(self, role: Role, width: int) -> int:
        """Bytes of one row of a matrix, padded to whole groups if quantised.

        With 4-bit projections the vocabulary has 8 bits; positions are never quantised.
        """
        stored = self.weights
        if stored in BITS and role == "positions":
            stored = self.checkpoint
        elif stored == "int4" and role == "vocabulary":
            stored = "int8"
        if stored in BYTES:
            return BYTES[stored] * width
        groups = -(-width // self.group)
        return groups * (self.group * BITS[stored] // 8 + 2)

    def position_bytes(self, K: int, D: int) -> int:
        """Bytes of one position's keys and values in one layer: 2 K D numbers; int8 adds a 4-byte scale per vector."""
        if self.cache == "int8":
            return 2 * K * (D + 4)
        return 2 * K * D * BYTES[self.cache]

    @property
    def activation_bytes(self) -> int:
        """Bytes of one number of an activation."""
        return BYTES[self.activations]


def storage_for(
    weights: str = "auto", cache: str = "auto", *, checkpoint: str = "float16", on_cpu: bool = False, group: int = 32
) -> Storage:
    """The formats given, with "auto" resolved.

    Weights default to the checkpoint's format. On a CPU activations and cache are float32; elsewhere they are as wide
    as the weights, at least 16 bits.

    Raises:
        ParameterError: a format is unknown.
    """
    weights = checkpoint if weights == "auto" else weights
    half = next((name for name in (weights, checkpoint) if name in ("float16", "bfloat16")), "float16")
    activations = "float32" if on_cpu or weights == "float32" else half
    cache = activations if cache == "auto" else cache
    return Storage(weights=weights, cache=cache, activations=activations, checkpoint=checkpoint, group=group)
