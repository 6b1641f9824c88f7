"""Fields and tensors of an architecture whose form in files the tables of `architectures.py` cannot say.

A table has one field for each metadata key and one tensor for each tensor. Where a field follows from several keys, or
a tensor is stored as parts, in another order or as other numbers, the architecture has a `Translation`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.formats import FLOAT32, Format
from ...backends.loader import CHUNK, Tensor
from ...config import Fields
from ...errors import CheckpointError
from ...reference.quantize import Quantized
from ..tensors import FLOATS, ComputedTensor
from .file import GGUF, Array
from .tensors import GROUPS, in_float16


@dataclass(frozen=True)
class Written:
    """A tensor of a file that is written."""

    parts: list[Tensor]
    """Its rows, one part below the other; or one part for each expert"""
    format: Format
    shape: tuple[int, ...] | None = None
    """Its shape in the file, if it is not that of the parts"""


class Translation:
    """The rules of an architecture beside its tables, in both directions; here there are none."""

    keys: frozenset[str] = frozenset()
    """Metadata keys, without the architecture's prefix, that are read here"""
    own_heads = False
    """The widths of heads, and which numbers of them are rotated, are read here"""
    own_rotary = False
    """Rotary embedding and windows are written here"""

    scaling_fields: frozenset[str] = frozenset()
    """Fields of the table of rotary scaling, beside the usual ones, that are written here"""

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of config.json that the metadata say, beside those of the tables.

        Args:
            gguf: the file
            raw: the fields of the tables

        Raises:
            CheckpointError, UnsupportedModelError: an entry is missing, invalid or asks for something else.
        """
        return {}

    def rotary(self, factors: NDArray[np.float32], raw: Mapping[str, Any], where: str) -> dict[str, Any] | None:
        """Fields that `rope_freqs.weight` says; None: as in Llama 3.1. [D / 2]

        Raises:
            UnsupportedModelError: they are other factors than are run.
        """
        return None

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """A tensor of the file by the names that `build` asks for; None: as the tables say.

        Raises:
            CheckpointError: its shape is not what the metadata say; `where` names file and tensor.
        """
        return None

    def refusals(self, config: Any, table: Fields) -> dict[str, bool]:
        """Things that llama.cpp computes in one way alone: "with ... alone" -> whether the configuration differs.

        Args:
            config: the configuration
            table: of rotary scaling, as in config.json
        """
        return {}

    def entries(self, config: Any, table: Fields, where: str) -> dict[str, Any]:
        """Metadata entries beside those of the tables, without the architecture's prefix; None: there is none."""
        return {}

    def factors(self, config: Any) -> dict[str, NDArray[np.float32]]:
        """Tensors that no checkpoint has, by which rotary frequencies are divided."""
        return {}

    def written(self, name: str, tensors: Mapping[str, Written], config: Any) -> dict[str, Written] | None:
        """A tensor that `build` asks for by its names in the file; None: as the tables say.

        Args:
            name: the tensor's
            tensors: all that `build` asks for, by their names
            config: the configuration
        """
        return None


@dataclass(frozen=True, eq=False)
class Rewritten(ComputedTensor):
    """Other numbers, or another order of them, than `source` has: in float16 where they cannot stay in its blocks."""

    source: Any
    arrange: Callable[[NDArray[Any]], NDArray[Any]]
    """Maps the whole tensor, as an array"""

    @property
    def name(self) -> str:
        """The source's name in the file."""
        return str(getattr(self.source, "name", ""))

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of the result."""
        with np.errstate(all="ignore"):
            return self.arrange(np.broadcast_to(np.float32(0), self.source.shape)).shape

    @property
    def dtype(self) -> str:
        """The source's if that is a float, else float16."""
        return self.source.dtype if self.source.dtype in FLOATS else "float16"

    def stored(self) -> Any:
        """The numbers in `dtype`."""
        if self.source.dtype in FLOATS:
            return np.ascontiguousarray(self.arrange(self.source.stored()))
        return super().stored()

    def chunks(self) -> Any:
        """The values as float32, some rows at a time."""
        values = self.arrange(self.source.load())
        rows = max(1, CHUNK // max(1, values[:1].size))
        for first in range(0, len(values), rows):
            yield np.ascontiguousarray(values[first : first + rows])

    def rounded(self, chunk: NDArray[np.float32]) -> NDArray[Any]:
        """Values as float16; a float's are not rounded but as stored."""
        return in_float16(chunk, self.name)

    def read_into(self, out: NDArray[Any]) -> None:
        """Fill `out` with the values: as float32, or in `dtype`."""
        if out.dtype != np.float32 and self.source.dtype in FLOATS:
            out[...] = self.stored()
        else:
            super().read_into(out)

    def part(self, axis: int, first: int, stop: int) -> "Rewritten":
        """Rows (axis 0) or columns (axis 1) `first` to `stop`; all of `source` is read."""
        taken = (slice(None),) * axis + (slice(first, stop),)
        return replace(self, arrange=lambda whole: self.arrange(whole)[taken])


@dataclass(frozen=True, eq=False)
class Columns(ComputedTensor):
    """Columns of `source` in another order: groups of 32 with a scale stay what they are, other blocks are float16."""

    source: Any
    order: NDArray[np.intp]
    """Numbers of the source's columns"""

    @property
    def name(self) -> str:
        """The source's name in the file."""
        return str(getattr(self.source, "name", ""))

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """As many rows, and the columns in `order`."""
        return (self.source.shape[0], len(self.order))

    @property
    def _groups(self) -> NDArray[np.intp] | None:
        """Numbers of the source's groups of columns, if it has such and `order` takes whole ones."""
        runs = self.order.reshape(-1, 32) if len(self.order) % 32 == 0 else None
        if self.source.dtype not in GROUPS.values() or runs is None or runs.size == 0:
            return None
        whole = (runs[:, 0] % 32 == 0).all() and (np.diff(runs, axis=1) == 1).all()
        return runs[:, 0] // 32 if whole else None

    @property
    def dtype(self) -> str:
        """The source's, or float16."""
        return self.source.dtype if self.source.dtype in FLOATS or self._groups is not None else "float16"

    def stored(self) -> Any:
        """The numbers in `dtype`."""
        if self.source.dtype in FLOATS:
            return np.ascontiguousarray(self.source.stored()[:, self.order])
        groups = self._groups
        if groups is None:
            return super().stored()
        stored: Quantized = self.source.stored()

        def taken(array: NDArray[Any]) -> NDArray[Any]:
            of_groups = array.reshape(len(array), stored.scales.shape[1], -1)  # [out, n] -> [out, groups, n / groups]
            return np.ascontiguousarray(of_groups[:, groups].reshape(len(array), -1))

        offsets = None if stored.offsets is None else taken(stored.offsets)
        return Quantized(taken(stored.values), taken(stored.scales), len(self.order), offsets)

    def chunks(self) -> Any:
        """The values as float32, some rows at a time."""
        for chunk in self.source.chunks():
            yield np.ascontiguousarray(chunk[:, self.order])

    def rounded(self, chunk: NDArray[np.float32]) -> NDArray[Any]:
        """Values as float16."""
        return in_float16(chunk, self.name)

    def read_into(self, out: NDArray[Any]) -> None:
        """Fill `out` with the values: as float32, or in `dtype`."""
        if out.dtype != np.float32 and self.source.dtype in FLOATS:
            out[...] = self.stored()
        else:
            super().read_into(out)

    def part(self, axis: int, first: int, stop: int) -> "Columns":
        """Rows (axis 0) or columns (axis 1) `first` to `stop`; of a file only these rows are read."""
        if axis:
            return replace(self, order=self.order[first:stop])
        return replace(self, source=self.source.part(0, first, stop))


def layer_name(name: str, stem: str) -> str | None:
    """The rest of a tensor's name behind its layer: "attn_q.weight" of "blk.3.attn_q.weight", by the stem "blk"."""
    parts = name.split(".", 2)
    return parts[2] if len(parts) == 3 and parts[0] == stem and parts[1].isdecimal() else None


def renamed(name: str, rest: str, stem: str = "layers") -> str:
    """The name of a tensor of the same layer: "layers.3." and `rest`."""
    return f"{stem}.{name.split('.', 2)[1]}.{rest}"


def check_shape(tensor: Any, shape: tuple[int, ...], where: str) -> None:
    """Refuse a tensor of another shape than the metadata say.

    Raises:
        CheckpointError: it has another.
    """
    if tensor.shape != shape:
        raise CheckpointError(f"{where} should have shape {list(shape)} by its metadata, found {list(tensor.shape)}")


def unrounded(tensor: Tensor, shape: tuple[int, ...] | None = None) -> Written:
    """A tensor that is float32 in every file."""
    return Written([tensor], FLOAT32, shape)


def whole_heads(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The share of each head that is rotated: all of it where the file does not say, unlike in config.json."""
    return {"partial_rotary_factor": raw.get("partial_rotary_factor", 1.0)}


def head_width(raw: Mapping[str, Any]) -> int:
    """D: an equal share of the model's width where the fields do not say."""
    width: int = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return width


class Keys:
    """Metadata entries under the architecture's name, checked."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf, self.prefix = gguf, gguf.metadata["general.architecture"]

    def has(self, key: str) -> bool:
        """Whether there is an entry."""
        return f"{self.prefix}.{key}" in self.gguf.metadata

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number; that of an array with one for each layer, if they are equal.

        Raises:
            CheckpointError: there is none and no default, or it is less than `least`, or layers differ.
        """
        name = f"{self.prefix}.{key}"
        value: Any = self.gguf.metadata.get(name, default)
        if value is None:
            raise CheckpointError(f"{self.gguf.path} lacks {name}")
        if isinstance(value, Array):
            numbers = self.each(key)
            value = numbers[0] if numbers and set(numbers) == {numbers[0]} else "numbers that differ"
        if type(value) is not int or not least <= value < 2**31:
            raise CheckpointError(
                f"{self.gguf.path}: {name} should be a number from {least} on, the same for all layers, "
                f"found {value!r:.60}"
            )
        return value

    def is_array(self, key: str) -> bool:
        """Whether the entry is an array."""
        return isinstance(self.gguf.metadata.get(f"{self.prefix}.{key}"), Array)

    def each(self, key: str) -> list[Any]:
        """The numbers of an array; empty if there is none.

        Raises:
            CheckpointError: it is none of numbers.
        """
        numbers = self.gguf.numbers(f"{self.prefix}.{key}")
        return [] if numbers is None else numbers.tolist()

    def number(self, key: str, default: float) -> float:
        """A number as it was before it became a float32."""
        return float(f"{self.gguf.get(f'{self.prefix}.{key}', float, default):.7g}")
