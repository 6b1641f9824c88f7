"""Tensors stored in another order than the model uses: transposed matrices, interleaved Q, K, V rows."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.weights import CHUNK, Tensor


@dataclass(frozen=True, eq=False)
class Rearranged:
    """A reordered tensor. Reading copies it: the file cannot be used in place."""

    source: Tensor
    """The tensor in the file's order"""
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


def source_of(tensor: Tensor) -> Tensor:
    """The underlying tensor, in the file's order."""
    return tensor.source if isinstance(tensor, Rearranged) else tensor


def transposed(tensor: Tensor) -> Rearranged:
    """[in, out] as [out, in]."""
    return Rearranged(tensor, np.transpose)


def qkv_apart(tensor: Tensor, H: int) -> Tensor:
    """Reorder rows stored head by head (each head's Q, K, V) to Q of all heads, then K, then V.

    Args:
        tensor: weight or bias [H 3 D, ...]. One with another number of rows is returned unchanged: the shape check
            that follows reports it.
        H: heads
    """
    rows = math.prod(tensor.shape[:1])
    if rows % (3 * H):
        return tensor

    def apart(stored: NDArray[Any]) -> NDArray[Any]:
        heads = stored.reshape(H, 3, rows // (3 * H), *stored.shape[1:])  # [H 3 D, ...] -> [H, 3, D, ...]
        return heads.swapaxes(0, 1).reshape(stored.shape)  # [H, 3, D, ...] -> [3, H, D, ...] -> [3 H D, ...]

    return Rearranged(tensor, apart)


def with_qkv_apart(tensors: Mapping[str, Tensor], H: int) -> dict[str, Tensor]:
    """All tensors, with `qkv_apart` applied to those named "query_key_value"."""
    return {name: qkv_apart(tensor, H) if ".query_key_value." in name else tensor for name, tensor in tensors.items()}
