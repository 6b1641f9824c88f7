"""Writing a checkpoint: safetensors files filled row by row, in a folder created atomically.

Format: https://github.com/huggingface/safetensors (README, "Format"); shards and their index are those of transformers'
`save_pretrained`.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, ParameterError
from ..output_files import undone_by_signals
from .safetensors import TYPES

ALIGNMENT = 64
"""Alignment of tensors in bytes: a cache line, and the widest vector load."""
SHARD_BYTES = 5 * 10**9
"""Maximum size of a weight file, as in `save_pretrained`."""

_CODES = {dtype: (code, itemsize) for code, (dtype, itemsize) in TYPES.items()}


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


def check_absent(folder: Path) -> None:
    """Check that `folder` can be created.

    Raises:
        ParameterError: `folder` exists, or its parent does not.
    """
    if os.path.lexists(folder):
        raise ParameterError(f"{folder} exists already: name a folder that does not, or remove it")
    if not folder.parent.is_dir():
        raise ParameterError(f"there is no folder {folder.parent} to write {folder.name!r} into")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Create a folder atomically: it gets its name when it is complete.

    Until then it is called ".NAME.partial-" and the process id, in the same parent folder. It is removed on any error,
    and if a signal ends the command line; only a process that is killed (SIGKILL) leaves it behind.

    Raises:
        ParameterError: as `check_absent`.
        CheckpointError: it cannot be written, for example because the disk is full.
    """
    check_absent(folder)
    partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"

    def remove() -> None:
        shutil.rmtree(partial, ignore_errors=True)

    try:
        with undone_by_signals(remove):
            partial.mkdir()
            try:
                yield partial
                check_absent(folder)
                partial.rename(folder)
            except BaseException:
                remove()
                raise
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error.strerror or error}; nothing of it was left behind"
        ) from error
