"""Formats of weights, activations and the K/V cache, each chosen on its own.

Users choose a format by its name; the tables below are the only place where a name becomes a format.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np

from ..reference.blocks import BLOCK_FORMATS

Role = Literal["projection", "vocabulary", "positions", "router", "labels"]
"""The use of a matrix: projection; token embeddings and LM head; embeddings of positions and token types; choice of
experts; classification."""
LOGITS: tuple[Role, ...] = ("vocabulary", "router", "labels")
"""Roles of matrices whose products are logits, which are always float32."""


_OFFSETS = {0: "", 8: " with zero points", 16: " with offsets"}


@dataclass(frozen=True)
class Format:
    """How the numbers of a row are stored: each alone, or as integers with a scale for each group."""

    kind: Literal["float", "bfloat", "int"]
    bits: int
    """Bits of a number"""
    scale_bits: int = 0
    """Bits of a scale; 0: there are no scales"""
    group: int = 0
    """Neighbours in a row that share a scale; 0: the whole row"""
    offset_bits: int = 0
    """Bits of a group's offset (16) or zero point (8); 0: there is none"""
    block: str = ""
    """Name of the block format, in `reference/blocks.py`; bits, scales and group are then what it has about"""

    @property
    def name(self) -> str:
        """The name that users know it by: "bfloat16", "int4 with zero points"."""
        return self.block or f"{self.kind}{self.bits}{_OFFSETS[self.offset_bits]}"

    @property
    def dtype(self) -> Any:
        """The NumPy type of the array that holds it on a CPU: bfloat16 as its bits, int4 as two numbers a byte."""
        if self.kind == "float":
            return np.dtype(f"float{self.bits}")
        if self.kind == "bfloat":
            return np.dtype(np.uint16)
        return np.dtype(np.int8 if self.bits == 8 else np.uint8)

    @property
    def offset_dtype(self) -> Any:
        """The NumPy type of offsets or zero points."""
        return np.dtype(np.float16 if self.offset_bits == 16 else np.uint8)

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` numbers, padded to whole groups, with its scales and offsets."""
        if self.block:
            return BLOCK_FORMATS[self.block].row_bytes(width)
        if not self.scale_bits or not width:
            return width * self.bits // 8
        group = self.group or width
        return -(-width // group) * (group * self.bits + self.scale_bits + self.offset_bits) // 8


FLOAT32, FLOAT16, BFLOAT16 = Format("float", 32), Format("float", 16), Format("bfloat", 16)
INT8, INT4 = Format("int", 8, scale_bits=16, group=32), Format("int", 4, scale_bits=16, group=32)

FORMATS = {form.name: form for form in (FLOAT32, FLOAT16, BFLOAT16, INT8, INT4)}
"""Formats that a matrix is rounded to; those with scales are defined in `reference/quantize.py`."""

INT4_OFFSETS, INT4_ZEROS = replace(INT4, offset_bits=16), replace(INT4, offset_bits=8)
BLOCKS = {
    name: Format("int", 8 * block.bytes // block.numbers, scale_bits=16, group=block.group, block=name)
    for name, block in BLOCK_FORMATS.items()
}
"""The block formats of GGUF files"""
STORED_FORMATS = FORMATS | {form.name: form for form in (INT4_OFFSETS, INT4_ZEROS)} | BLOCKS
"""Formats that a matrix of a checkpoint may be in, and keep"""

CACHE_FORMATS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": Format("int", 8, scale_bits=32), "int4": INT4}
"""Formats of the K/V cache (`stored_vectors.py`); int8 has a scale for the vector of each position and head, int4 for
each 32 numbers."""

COMPUTE_FORMATS = {form.name: form for form in (FLOAT32, BFLOAT16)}
"""Formats of activations while the kernels in C multiply them with matrices of bfloat16; sums are float32."""

ACTIVATION_FORMATS = {form.name: form for form in (FLOAT32, FLOAT16)}
"""Formats of results that NumPy computes with. Logits are always float32."""


@dataclass(frozen=True)
class WeightFormats:
    """The format of each role of matrix; None keeps the checkpoint's."""

    projection: Format | None
    vocabulary: Format | None
    positions: Format | None
    """Also of routers, which are as small, and choose other experts if they are rounded much; and of labels"""

    def of(self, role: Role) -> Format | None:
        """The format of a matrix with this role."""
        formats: dict[Role, Format | None] = {
            "projection": self.projection,
            "vocabulary": self.vocabulary,
            "positions": self.positions,
            "router": self.positions,
            "labels": self.positions,
        }
        return formats[role]

    def in_groups(self, group: int) -> "WeightFormats":
        """The same, with another number of weights that share a scale."""
        formats = (self.projection, self.vocabulary, self.positions)
        return WeightFormats(
            *(form and (replace(form, group=group) if form.scale_bits and not form.block else form) for form in formats)
        )


WEIGHT_FORMATS = {
    "auto": WeightFormats(None, None, None),
    **{form.name: WeightFormats(form, form, form) for form in (FLOAT32, FLOAT16, BFLOAT16)},
    "int8": WeightFormats(INT8, INT8, None),
    "int4": WeightFormats(INT4, INT8, None),
}
"""The formats that a dtype stands for, as a user may ask for it. With 4-bit projections the vocabulary has 8 bits;
position embeddings, which are read in few rows, and routers are not quantised."""

Chosen = TypeVar("Chosen", Format, WeightFormats)


def chosen(known: dict[str, Chosen], choice: str | Chosen) -> Chosen:
    """A format given by its name in a table, or as it is."""
    return known[choice] if isinstance(choice, str) else choice
