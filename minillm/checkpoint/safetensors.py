"""The safetensors format: the length of a header, the header in JSON, then the bytes of the tensors, end to end.

Format: https://github.com/huggingface/safetensors (README, "Format"). The safetensors library returns copies and
supports bfloat16 only with a second library; the offsets in the header are all that a memory map needs.
"""

import math
from pathlib import Path

from ..errors import CheckpointError
from ..files import parse_json
from .tensors import StoredTensor, WeightFile, c_strides, is_count, is_shape

_MAX_HEADER = 100_000_000  # the format's own limit
TYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Type name in the file -> our name, bytes per element."""


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name. Reads the header only and checks all of it.

    Raises:
        CheckpointError: the file is truncated, or its header violates the format.
    """
    file = WeightFile(path)
    if file.size < 8:
        raise CheckpointError(f"{path} is no safetensors file: it has {file.size} bytes and no header")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > _MAX_HEADER:
        raise CheckpointError(f"{path} is no safetensors file: its first 8 bytes announce a header of {length} bytes")
    if 8 + length > file.size:
        raise CheckpointError(f"{path} is truncated: its header ends at byte {8 + length}, the file at {file.size}")
    header = parse_json(file.read(8, length), f"the header of {path}", unique=True)
    header.pop("__metadata__", None)
    tensors = [_tensor(name, entry, file, 8 + length) for name, entry in header.items()]
    end = 8 + length
    for tensor, size in sorted(tensors, key=lambda pair: (pair[0].offset, pair[1])):
        if tensor.offset != end:
            raise CheckpointError(
                f"tensor {tensor.name!r} in {path} starts at byte {tensor.offset}, but the one before it ends at {end}"
            )
        end += size
        if end > file.size:
            raise CheckpointError(
                f"{path} is truncated: tensor {tensor.name!r} ends at byte {end}, the file at {file.size}"
            )
    if end < file.size:
        raise CheckpointError(f"{path} has {file.size - end} bytes at its end that belong to no tensor")
    return {tensor.name: tensor for tensor, _ in tensors}


def _tensor(name: str, entry: object, file: WeightFile, data_start: int) -> tuple[StoredTensor, int]:
    """The tensor that one entry of the header describes, and its size in bytes."""
    where = f"tensor {name!r} in {file.path}"
    match entry:
        case {"dtype": str(stored), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise CheckpointError(f"{where} lacks a dtype, a shape or a pair of data_offsets in the header")
    if not is_shape(shape) or not is_count(begin) or not is_count(end) or begin > end:
        raise CheckpointError(f"{where} has an impossible shape or impossible data_offsets in the header")
    dtype, itemsize = TYPES.get(stored, (stored, None))  # an unknown type is refused when it is read
    expected = end - begin if itemsize is None else math.prod(shape) * itemsize
    if end - begin != expected:
        raise CheckpointError(f"{where} takes {end - begin} bytes, but {dtype} of shape {shape} needs {expected}")
    return StoredTensor(name, tuple(shape), dtype, file, data_start + begin, c_strides(shape)), end - begin
