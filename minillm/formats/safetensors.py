"""The safetensors format: the length of a header, the header in JSON, then the bytes of the tensors, end to end.

The library of that name validates a file. It returns copies of the tensors, and bfloat16 only with a second library, so
the tensors are located here by the offsets in the header, and then mapped. Writing, too, is done here: the library
needs every tensor of a file in memory, `SafetensorsFile` a few rows.

Format: https://github.com/huggingface/safetensors (README, "Format"). Shards and their index are those of transformers'
`save_pretrained`.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from ..files import parse_json
from .tensors import StoredTensor, WeightFile, c_strides, is_shape

_CODES = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
}
"""The dtypes that are read and written -> name in the file, bytes per element."""
_DTYPES = {code: dtype for dtype, (code, _) in _CODES.items()} | {
    "F64": "float64",
    "I64": "int64",
    "I32": "int32",
    "U32": "uint32",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Name in the file -> dtype; one that is not listed keeps its name. It is refused when its values are read."""

ALIGNMENT = 64
"""Alignment of tensors in bytes: a cache line, and the widest vector load."""
SHARD_BYTES = 5 * 10**9
"""Maximum size of a weight file, as in `save_pretrained`."""


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name. Only the header is read.

    Raises:
        CheckpointError: the file is truncated, or its header violates the format.
    """
    from safetensors import SafetensorError, safe_open

    file = WeightFile(path)
    try:
        with safe_open(path, "np"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()).removeprefix("Error while deserializing header: ")
        raise CheckpointError(
            f"{path} is truncated, damaged or no safetensors file ({reason:.200}): fetch it again"
        ) from None
    length = int.from_bytes(file.read(0, 8), "little")
    header = parse_json(file.read(8, length), f"the header of {path}", unique=True)
    file.check_unchanged()  # it is the file that the library has validated
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not is_shape(entry["shape"]):
            raise CheckpointError(f"tensor {name!r} in {path} has the shape {entry['shape']!r:.60}, which is none")
    return {
        name: StoredTensor(
            name,
            tuple(entry["shape"]),
            _DTYPES.get(entry["dtype"], entry["dtype"]),
            file,
            8 + length + entry["data_offsets"][0],
            c_strides(entry["shape"]),
        )
        for name, entry in header.items()
    }


@dataclass(frozen=True)
class Entry:
    """A tensor to be written to a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * _CODES[self.dtype][1]


class SafetensorsFile:
    """A new safetensors file whose tensors are written in any order, some rows at a time.

    The format allows no gaps between tensors. So tensors whose size is a multiple of 64 bytes come first, in the given
    order, and each of them is aligned to 64 bytes.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self._row_bytes: dict[str, int] = {}
        self._offsets: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
        end = 0
        for entry in sorted(entries, key=lambda entry: entry.nbytes % ALIGNMENT != 0):
            begin, end = end, end + entry.nbytes
            header[entry.name] = {
                "dtype": _CODES[entry.dtype][0],
                "shape": list(entry.shape),
                "data_offsets": [begin, end],
            }
            self._offsets[entry.name] = begin
            self._row_bytes[entry.name] = entry.nbytes // max(1, entry.shape[0])
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        self._data_start = 8 + len(text)
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, rows: NDArray[Any], first: int = 0) -> None:
        """Write rows of a tensor at row `first`. [n, ...]"""
        self._file.seek(self._data_start + self._offsets[name] + first * self._row_bytes[name])
        self._file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def spread(groups: Sequence[Sequence[Entry]], limit: int) -> dict[str, list[Entry]]:
    """Distribute tensors over files: name -> entries. Groups are not split; only a larger group exceeds `limit`."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for group in groups:
        nbytes = sum(entry.nbytes for entry in group)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1] += group
        size += nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def index_of(shards: dict[str, list[Entry]]) -> dict[str, Any]:
    """Contents of model.safetensors.index.json for several files."""
    total = sum(entry.nbytes for entries in shards.values() for entry in entries)
    weight_map = {entry.name: name for name, entries in shards.items() for entry in entries}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}
