"""The formats of a model's weights, K/V cache and activations."""

from dataclasses import dataclass
from typing import Any

from ...backends.formats import BLOCKS, FORMATS, INT4_OFFSETS, STORED_FORMATS
from ...errors import ParameterError

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number"""
WEIGHT_FORMATS = tuple(FORMATS)
CACHE_FORMATS = (*BYTES, "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Formats of weights, cache and activations."""

    weights: str = "float32"
    """Matrices: one of `WEIGHT_FORMATS`, or another that a checkpoint keeps, of `STORED_FORMATS`"""
    cache: str = "float32"
    """Keys and values: one of `CACHE_FORMATS`"""
    activations: str = "float32"
    """Results of operations: a key of `BYTES`"""
    checkpoint: str = "float32"
    """The position table if weights have 8 or 4 bits: a key of `BYTES`"""
    group: int = 32
    """Weights that share a scale"""
    keeps_vocabulary: bool = False
    """Weights in 8 or 4 bits leave the embedding and the LM head in the checkpoint's dtype"""

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
            if value not in known and not (name == "dtype" and value in STORED_FORMATS):
                raise ParameterError(f"{name} {value!r} is not known: expected one of {', '.join(known)}")

    @classmethod
    def all_in(cls, dtype: str) -> "Storage":
        """Weights, cache and activations in one dtype, as on a GPU."""
        return cls(weights=dtype, cache=dtype, activations=dtype, checkpoint=dtype)

    @property
    def activation_bytes(self) -> int:
        """Bytes of one number of an activation."""
        return BYTES[self.activations]


def storage_for(
    weights: str = "auto",
    cache: str = "auto",
    *,
    checkpoint: str = "float16",
    on_cpu: bool = False,
    **fields: Any,
) -> Storage:
    """The formats given, with "auto" resolved.

    Weights default to the checkpoint's format. On a CPU activations and cache are float32; elsewhere they are as wide
    as the weights, at least 16 bits. Other `fields` are `Storage`'s.

    Raises:
        ParameterError: a format is unknown.
    """
    weights = checkpoint if weights == "auto" else weights
    if weights in BLOCKS and not on_cpu:  # as the loader of a GPU converts them
        weights = INT4_OFFSETS.name if weights == "Q4_K" else "float16"
    half = next((name for name in (weights, checkpoint) if name in ("float16", "bfloat16")), "float16")
    activations = "float32" if on_cpu or weights == "float32" else half
    cache = activations if cache == "auto" else cache
    return Storage(weights=weights, cache=cache, activations=activations, checkpoint=checkpoint, **fields)
