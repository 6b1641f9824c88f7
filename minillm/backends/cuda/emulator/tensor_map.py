"""Tensor maps as the emulator reads them, in place of the driver's."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..tensor_maps import PIECE, Map, Tensor, aligned_map

MOST_DIMENSIONS, MOST_BOX = 4, 256
LAYOUT = np.dtype([
    ("address", np.uint64), ("dimensions", np.uint64), ("sizes", np.uint64, MOST_DIMENSIONS),
    ("strides", np.uint64, MOST_DIMENSIONS), ("box", np.uint32, MOST_DIMENSIONS),
])  # fmt: skip
"""emulation::TensorMap of include/runtime.h"""


def encode(tensor: Tensor) -> Map:
    """The map of a tensor; as strict as the driver's documentation.

    Raises:
        ValueError: the driver would refuse it.
    """
    rank = len(tensor.sizes)
    if not 1 < rank <= MOST_DIMENSIONS or (len(tensor.strides), len(tensor.box)) != (rank - 1, rank):
        raise ValueError(f"a map of {rank} dimensions: {tensor}")
    if any(number % PIECE for number in (tensor.address, *tensor.strides)):
        raise ValueError(f"address and strides should be multiples of {PIECE} bytes: {tensor}")
    if any(after % before for before, after in zip(tensor.strides, tensor.strides[1:], strict=False)):
        raise ValueError(f"each stride should be a multiple of the one before it: {tensor}")
    if not all(0 < size <= MOST_BOX for size in tensor.box) or not all(tensor.sizes):
        raise ValueError(f"a box has 1 to {MOST_BOX} numbers in each dimension: {tensor}")
    made = aligned_map()
    fields = _fields(made)
    fields["address"], fields["dimensions"] = tensor.address, rank
    for name, values in (("sizes", tensor.sizes), ("strides", (2, *tensor.strides)), ("box", tensor.box)):
        fields[name] = (*values, *(1,) * (MOST_DIMENSIONS - rank))
    return made


def decode(made: Map) -> Tensor:
    """The tensor that `encode` made a map of."""
    fields = _fields(made)
    rank = int(fields["dimensions"])
    sizes, strides, box = (tuple(map(int, fields[name][:rank])) for name in ("sizes", "strides", "box"))
    return Tensor(int(fields["address"]), sizes, strides[1:], box)


def moved(made: Map, where: Callable[[int], int]) -> Map:
    """A map of what lies now where `where` says."""
    tensor = decode(made)
    return encode(tensor._replace(address=where(tensor.address)))


def _fields(made: Map) -> Any:
    return made.reshape(1).view(np.uint8)[: LAYOUT.itemsize].view(LAYOUT)[0]
