"""Parameters in memory: their formats, the conversion of tensors to them, and their expansion for the reference."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..reference.quantize import Quantized, dequantize, quantize

CHUNK = 1 << 20
"""Numbers of a tensor that are made or reordered at a time."""
FORMATS = ("float32", "float16", "bfloat16", "int8", "int4")
"""Storage formats; the last two in groups with a scale each (`reference/quantize.py`)."""

_BITS = {"int8": 8, "int4": 4}
_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}  # bfloat16: its bits


class Tensor(Protocol):
    """A tensor that is read when needed: `checkpoint.StoredTensor`, or random numbers."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """The type it is stored as, one of `FORMATS`."""

    def load(self) -> NDArray[np.float32]:
        """The values, memory-mapped if possible."""

    def read_into(self, out: NDArray[Any]) -> None:
        """Fill `out`, of this shape: with the values as float32, or with numbers in 16 bits as they are stored."""

    def stored(self) -> Any:
        """The tensor as stored: an array, bfloat16 as the uint16 of its bits, or a `Quantized`; mapped if possible."""

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The values, some rows at a time; a chunk may reuse the memory of the one before."""

    def followed_by(self, other: Any) -> "Tensor | None":
        """This tensor and `other` as one, if their rows are contiguous in a file; else None."""

    def part(self, axis: int, first: int, stop: int) -> "Tensor":
        """Rows (axis 0) or columns (axis 1) `first` to `stop`; of a file, the rest is not read."""


@dataclass(frozen=True, eq=False)
class Rearranged:
    """A tensor in another order than `source`, or a part of it. Reading copies it: no file can be used in place."""

    source: Tensor
    arrange: Callable[[NDArray[Any]], NDArray[Any]]
    """Maps the stored order to the wanted one; values unchanged, any dtype"""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after reordering."""
        return self.arrange(np.broadcast_to(np.uint8(0), self.source.shape)).shape

    @property
    def dtype(self) -> str:
        """The stored dtype."""
        return self.source.dtype

    def stored(self) -> Any:
        """The stored data, reordered."""
        return np.ascontiguousarray(self.arrange(self.source.stored()))

    def load(self) -> NDArray[np.float32]:
        """The values as float32, reordered."""
        return np.ascontiguousarray(self.arrange(self.source.load()))

    def read_into(self, out: NDArray[Any]) -> None:
        """Fill `out` with the values: as float32, or in the stored dtype."""
        out[...] = self.arrange(self.source.load() if out.dtype == np.float32 else self.source.stored())

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The values as float32, in chunks of rows."""
        values = self.arrange(self.source.load())
        rows = max(1, CHUNK // max(1, values[:1].size))
        for first in range(0, len(values), rows):
            yield np.ascontiguousarray(values[first : first + rows])

    def followed_by(self, other: Any) -> None:
        """None: reordered tensors are never adjacent in a file."""

    def part(self, axis: int, first: int, stop: int) -> "Rearranged":
        """Rows or columns `first` to `stop` of the reordered tensor, of which all of `source` is read."""
        taken = (slice(None),) * axis + (slice(first, stop),)
        return Rearranged(self.source, lambda stored: self.arrange(stored)[taken])


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter in the layout of its backend, opaque to all other code."""

    name: str
    """Its place in the model: "layers.3.fc1"."""
    data: Any
    """[out, in] of a projection, [V, E] of an embedding, [E] of a norm's gain; None for a norm without one"""
    bias: Any | None = None
    """[out]"""

    def rows_from(self, first: int) -> "Weight":
        """The same table without its first rows, which are never looked up."""
        return replace(self, data=self.data[first:])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `data`; of the numbers it encodes if it is quantised."""
        shape: tuple[int, ...] = self.data.shape
        return shape

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return sum(array.nbytes for array in (self.data, self.bias) if array is not None)


def expand(data: Any, rows: Any = slice(None)) -> Any:
    """Convert any format to float32, all rows or those that `rows` picks; float32 itself is not copied."""
    if isinstance(data, Quantized):
        return dequantize(data, rows)
    picked = data[rows]
    if picked.dtype == np.uint16:
        return np.left_shift(picked, 16, dtype=np.uint32).view(np.float32)
    return picked.astype(np.float32, copy=False)


def gather(
    tensors: Sequence[Tensor],
    wanted: str,
    order: Literal["C", "F"] = "C",
    group: int = 32,
    kept: Collection[str] = FORMATS,
) -> Any:
    """Concatenate tensors along the first axis, as one array or `Quantized`.

    Tensors stored in the wanted format are not converted, and stay mapped if they are contiguous in a file.

    Args:
        tensors: [out_i, in] each
        wanted: one of `FORMATS`, or "auto": as they are stored
        order: memory order of float32; "F" is column-major
        group: weights per scale, for weights that are quantised here
        kept: the formats that "auto" keeps; all others become float32
    """
    stored = {tensor.dtype for tensor in tensors}
    if wanted == "auto":
        wanted = tensors[0].dtype if len(stored) == 1 and stored <= set(kept) else "float32"
    if wanted == "float32":
        return join(tensors, order)
    if stored <= {wanted} and (whole := in_one_piece(tensors)) is not None:
        return whole.stored()
    return _quantized(tensors, wanted, group) if wanted in _BITS else _narrowed(tensors, wanted)


def in_one_piece(tensors: Sequence[Tensor]) -> Tensor | None:
    """All tensors as one, if their rows are contiguous in a file; else None."""
    whole: Tensor | None = tensors[0]
    for tensor in tensors[1:]:
        whole = whole and whole.followed_by(tensor)
    return whole


def join(tensors: Sequence[Tensor], order: Literal["C", "F"] = "C") -> NDArray[np.float32]:
    """Concatenate tensors as float32; a single matrix stays mapped if possible.

    Vectors are copied: a mapped one keeps the pages around it in memory. Those of opt-125m are 0.5 MB and would keep
    3.6 MB of a file whose matrices are no longer read once they are rounded.
    """
    if len(tensors) == 1 and order == "C" and len(tensors[0].shape) > 1:
        return tensors[0].load()
    rows = [tensor.shape[0] for tensor in tensors]
    joined = np.empty((sum(rows), *tensors[0].shape[1:]), np.float32, order=order)
    stops = np.cumsum(rows)
    for tensor, stop in zip(tensors, stops, strict=True):
        tensor.read_into(joined[stop - tensor.shape[0] : stop])
    return joined


def narrow(values: NDArray[np.float32], wanted: str) -> NDArray[Any]:
    """Round float32 to 16 bits, to the nearest, ties to even. NaN stays NaN."""
    if wanted == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _narrowed(tensors: Sequence[Tensor], wanted: str) -> NDArray[Any]:
    rows = sum(tensor.shape[0] for tensor in tensors)
    out = np.empty((rows, *tensors[0].shape[1:]), _DTYPES[wanted])
    first = 0
    for tensor in tensors:
        if tensor.dtype == wanted:
            tensor.read_into(out[first : first + tensor.shape[0]])
            first += tensor.shape[0]
            continue
        for chunk in tensor.chunks():
            out[first : first + len(chunk)] = narrow(chunk, wanted)
            first += len(chunk)
    return out


def _quantized(tensors: Sequence[Tensor], wanted: str, group: int) -> Quantized:
    rows, whole, first = sum(tensor.shape[0] for tensor in tensors), None, 0
    for tensor in tensors:
        already = tensor.dtype == wanted
        for part in [tensor.stored()] if already else (quantize(c, _BITS[wanted], group) for c in tensor.chunks()):
            if whole is None:
                values, scales = (np.empty((rows, a.shape[1]), a.dtype) for a in (part.values, part.scales))
                whole = Quantized(values, scales, part.inputs)
            whole.values[first : first + part.shape[0]] = part.values
            whole.scales[first : first + part.shape[0]] = part.scales
            first += part.shape[0]
    assert whole is not None  # no model has a matrix without rows
    return whole
