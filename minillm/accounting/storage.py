"""How many bytes numbers take: weights in each format, the K/V cache, activations.

Written from the formats' descriptions (`reference/quantize.py`, `backends/weights.py`), not from arrays: that both
agree is what tests hold.
"""

from dataclasses import dataclass

from ..backends.base import Role
from ..errors import ParameterError

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Of one number"""
BITS = {"int8": 8, "int4": 4}
"""Of one number in a group that shares a scale of 2 bytes"""
WEIGHT_FORMATS = (*BYTES, *BITS)
CACHE_FORMATS = (*BYTES, "int8")
ID_BYTES = 8
"""Of a token id or a position"""
VECTOR_BYTES = 4
"""Of a number in a bias or a norm's gain, and of a logit: they stay float32 whatever the matrices are"""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How a model's numbers are kept."""

    weights: str = "float32"
    """Matrices: one of `WEIGHT_FORMATS`"""
    cache: str = "float32"
    """Keys and values: one of `CACHE_FORMATS`"""
    activations: str = "float32"
    """What operations hand to each other: a key of `BYTES`"""
    checkpoint: str = "float32"
    """What a table of positions stays in where weights have 8 or 4 bits: a key of `BYTES`"""
    group: int = 32
    """Weights that share a scale"""

    def __post_init__(self) -> None:
        """Refuse what there is not.

        Raises:
            ParameterError: a format is unknown; the message lists those known.
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
        """One row of a matrix. In groups, a row is padded to whole ones.

        Where projections have 4 bits the vocabulary has 8, and positions are never rounded to either.
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
        """Keys and values of one position in one layer: 2 K D numbers; in int8 each vector has a scale of 4 bytes."""
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
    """What is asked for; and for "auto" what is usual beside it.

    Weights stay as the checkpoint has them. On a CPU activations and cache are float32; elsewhere they are as wide as
    the weights, in 16 bits where those have fewer.

    Raises:
        ParameterError: a format is unknown.
    """
    weights = checkpoint if weights == "auto" else weights
    half = next((name for name in (weights, checkpoint) if name in ("float16", "bfloat16")), "float16")
    activations = "float32" if on_cpu or weights == "float32" else half
    cache = activations if cache == "auto" else cache
    return Storage(weights=weights, cache=cache, activations=activations, checkpoint=checkpoint, group=group)
