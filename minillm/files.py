"""Reading untrusted checkpoint files: only regular files, with a size limit by kind.

A pipe or a device could block the reader for ever or fill the memory; it is refused before it is opened. JSON is
read in one place, which turns any error into one line.
"""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from .errors import CheckpointError

_MIB = 2**20
LIMITS = {
    "tokenizer.json": 256 * _MIB,
    "tokenizer.model": 64 * _MIB,
    "sentencepiece.bpe.model": 64 * _MIB,
    "spiece.model": 64 * _MIB,
    "spm.model": 64 * _MIB,
    "source.spm": 64 * _MIB,
    "vocab.json": 64 * _MIB,
    "merges.txt": 64 * _MIB,
    "tokenizer_config.json": 16 * _MIB,
    "special_tokens_map.json": 16 * _MIB,
    "added_tokens.json": 16 * _MIB,
    "chat_template.jinja": _MIB,
    "tool_use.jinja": _MIB,
}
"""Maximum size in bytes by file name; the largest tokenizer.json published has 35 MiB. Weights may have any size."""
INDEX_LIMIT = 64 * _MIB
OTHER_LIMIT = 4 * _MIB
DEEPEST = 100
"""Maximum nesting of JSON lists and objects"""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file for reading.

    Raises:
        CheckpointError: it cannot be read, or it is a folder, a pipe or a device.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening, which has side effects for some devices
            raise CheckpointError(f"{path} is not a regular file")
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(path, flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path} is not a regular file")
            yield file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def read_bytes(path: Path) -> bytes:
    """The bytes of a small file.

    Raises:
        CheckpointError: it cannot be read, is not a regular file, or is larger than `LIMITS` says.
    """
    limit = INDEX_LIMIT if path.name.endswith(".index.json") else LIMITS.get(path.name, OTHER_LIMIT)
    with opened(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{path} is larger than {limit // _MIB} MiB, which no such file is")
    return data


def read_text(path: Path) -> str:
    """The text of a small file.

    Raises:
        CheckpointError: as `read_bytes`, or it is not UTF-8.
    """
    data = read_bytes(path)
    try:
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")  # as in text mode
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: expected UTF-8 text, found byte 0x{data[error.start]:02x}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file cannot be read (`read_bytes`), is not JSON or holds no object.
    """
    return parse_json(read_bytes(path), str(path))


def read_optional_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or {} if there is no such file. Raises as `read_json`."""
    return read_json(path) if path.exists() else {}


def parse_json(data: bytes, where: str, *, unique: bool = False) -> dict[str, Any]:
    """The object in a JSON text: strict JSON, valid Unicode, nested no deeper than `DEEPEST`.

    Args:
        data: UTF-8
        where: its source, for error messages
        unique: refuse a key that occurs twice in an object; else the last one counts

    Raises:
        CheckpointError: it is not.
    """

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise CheckpointError(f"{where} has the key {key!r:.80} twice")
        return members

    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse, object_pairs_hook=without_repeats if unique else None)
        _check_depth(value)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{where}: expected a JSON text, found half a surrogate pair in a string") from None
    except RecursionError:
        raise CheckpointError(f"{where}: expected a JSON text, found one nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: expected a JSON text, found {error!s:.200}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"the number {constant}, which JSON has not")


def _check_depth(value: Any) -> None:
    """Refuse nesting deep enough to overflow Python's recursion limit."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        level = [
            item
            for holder in level
            for item in (holder.values() if type(holder) is dict else holder)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return
    raise RecursionError
