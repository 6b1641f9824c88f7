"""Finds the checkpoints in a folder and the folders below."""

import os
from collections.abc import Iterator
from pathlib import Path

from .gguf.file import all_shards
from .weight_files import ADAPTER_CONFIG

DEPTH = 3
"""Levels of folders below the one given that are searched"""


def checkpoints_in(top: Path) -> Iterator[Path]:
    """GGUF files, and folders with a model or an adapter, in alphabetical order; hidden folders are left out."""
    for where, below, names in os.walk(top):
        folder = Path(where)
        below[:] = sorted(name for name in below if not name.startswith("."))
        if len(folder.relative_to(top).parts) >= DEPTH:
            below.clear()
        yield from gguf_files(folder)
        if "modules.json" in names:  # of sentence-transformers: the folders of its modules hold no models
            below[:] = [name for name in below if not name[0].isdigit()]
        if "config.json" in names or ADAPTER_CONFIG in names:
            yield folder


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder; only the first where several hold one model."""
    return sorted(path for path in folder.glob("*.gguf") if path.is_file() and path.name == all_shards(path.name)[0])


def bytes_of(checkpoint: Path) -> int:
    """Bytes on disk of a checkpoint: a folder's files, or a GGUF file with those that hold the rest of it.

    A link counts as its target.
    """
    if checkpoint.is_dir():
        return sum(path.stat().st_size for path in checkpoint.iterdir() if path.is_file())
    parts = [checkpoint.with_name(name) for name in all_shards(checkpoint.name)]
    return sum(path.stat().st_size for path in parts if path.is_file())
