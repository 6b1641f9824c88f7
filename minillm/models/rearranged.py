"""Stored matrices whose numbers a family wants in another order: transposed, or rows of heads sorted anew."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.random import CHUNK
from ..backends.weights import Tensor


@dataclass(frozen=True, eq=False)
class Rearranged:
    """A tensor in another order. It is copied when it is read: a file cannot be used in place."""

    source: Tensor
    """As the file has it"""
    arrange: Callable[[NDArray[Any]], NDArray[Any]]
    """From the stored order to the one that is wanted; the numbers stay as they are, in any dtype"""

    @property
    def shape(self) -> tuple[int, ...]:
        """In the new order."""
        return self.arrange(np.broadcast_to(np.uint8(0), self.source.shape)).shape

    @property
    def dtype(self) -> str:
        """As it is stored."""
        return self.source.dtype

    def stored(self) -> Any:
        """What is stored, in the new order."""
        return np.ascontiguousarray(self.arrange(self.source.stored()))

    def load(self) -> NDArray[np.float32]:
        """The values."""
        return np.ascontiguousarray(self.arrange(self.source.load()))

    def read_into(self, out: NDArray[Any]) -> None:
        """Fill `out` with the values, or with what is stored where it has that type."""
        out[...] = self.arrange(self.source.load() if out.dtype == np.float32 else self.source.stored())

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The values, some rows after the others."""
        values = self.arrange(self.source.load())
        rows = max(1, CHUNK // max(1, values[:1].size))
        for first in range(0, len(values), rows):
            yield np.ascontiguousarray(values[first : first + rows])

    def followed_by(self, other: Any) -> None:
        """No file has the new order."""


def source_of(tensor: Tensor) -> Tensor:
    """The tensor as its file has it."""
    return tensor.source if isinstance(tensor, Rearranged) else tensor


def transposed(tensor: Tensor) -> Rearranged:
    """[in, out] as [out, in]."""
    return Rearranged(tensor, np.transpose)


def qkv_apart(tensor: Tensor, H: int) -> Tensor:
    """Rows that are stored head by head, each head's Q, K and V, as Q of all heads, then K, then V.

    Args:
        tensor: [H 3 D, ...]: a weight or a bias. One whose rows are no such number is left as it is: it does not fit
            the model, which says so.
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
    """All tensors, those named "query_key_value" as `qkv_apart` has them."""
    return {name: qkv_apart(tensor, H) if ".query_key_value." in name else tensor for name, tensor in tensors.items()}
