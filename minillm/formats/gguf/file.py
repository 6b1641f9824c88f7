"""The GGUF format of llama.cpp: one file with the configuration, the tokenizer and the weights of a model.

    magic "GGUF", version, number of tensors, number of metadata entries
    metadata     key, type, value each; arrays hold scalars or strings
    tensors      name, dimensions (the contiguous one first), type, offset each
    data         from the next multiple of the alignment on; so is every tensor's offset

Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The header is read here and not by the package `gguf`: that one makes an array of every string (3 s for a vocabulary of
49,152 tokens), and a damaged count lets it fill the memory. Here all lengths are held against the file's size before
anything is read, and arrays are decoded when they are asked for. The types whose values are not plain numbers are in
`tensors.py`.
"""

import math
import mmap
import re
import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, UnsupportedModelError
from ...text.tokenizer.names import Names
from ..tensors import WeightFile, is_shape

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Versions that are read; 3 differs from 2 by allowing big-endian files, which are refused."""
HEADER_LIMIT = 256 * 2**20
"""Maximum bytes of a header (the largest published have about 20 MB)"""
ALIGNMENT = 32
"""Alignment of tensors in bytes if the metadata have none"""
MOST_DIMENSIONS = 4
NAMED_TOKENS = ("bos", "eos", "unknown", "padding", "eot", "eom")
"""`tokenizer.ggml.*_token_id`"""

_SCALARS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}
"""Type code in the metadata -> NumPy type"""
_STRING, _ARRAY = 8, 9
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class Type(NamedTuple):
    """A type of tensor: so many numbers take so many bytes."""

    name: str
    numbers: int
    bytes: int


_TYPES = """
0 F32 1 4  1 F16 1 2  2 Q4_0 32 18  3 Q4_1 32 20  6 Q5_0 32 22  7 Q5_1 32 24  8 Q8_0 32 34  9 Q8_1 32 40
10 Q2_K 256 84  11 Q3_K 256 110  12 Q4_K 256 144  13 Q5_K 256 176  14 Q6_K 256 210  15 Q8_K 256 292
16 IQ2_XXS 256 66  17 IQ2_XS 256 74  18 IQ3_XXS 256 98  19 IQ1_S 256 50  20 IQ4_NL 32 18  21 IQ3_S 256 110
22 IQ2_S 256 82  23 IQ4_XS 256 136  24 I8 1 1  25 I16 1 2  26 I32 1 4  27 I64 1 8  28 F64 1 8  29 IQ1_M 256 56
30 BF16 1 2  34 TQ1_0 256 54  35 TQ2_0 256 66  39 MXFP4 32 17
"""
TYPES = {
    int(code): Type(name, int(numbers), int(nbytes))
    for code, name, numbers, nbytes in zip(*[iter(_TYPES.split())] * 4, strict=True)
}
"""The types of tensors by their codes in a file; the table has code, name, and so many numbers in so many bytes"""

_FILE_TYPES = """
0 F32 1 F16 2 Q4_0 3 Q4_1 7 Q8_0 8 Q5_0 9 Q5_1 10 Q2_K 11 Q3_K_S 12 Q3_K_M 13 Q3_K_L 14 Q4_K_S 15 Q4_K_M 16 Q5_K_S
17 Q5_K_M 18 Q6_K 19 IQ2_XXS 20 IQ2_XS 21 Q2_K_S 22 IQ3_XS 23 IQ3_XXS 24 IQ1_S 25 IQ4_NL 26 IQ3_S 27 IQ3_M 28 IQ2_S
29 IQ2_M 30 IQ4_XS 31 IQ1_M 32 BF16 36 TQ1_0 37 TQ2_0 38 MXFP4_MOE 39 NVFP4 40 Q1_0
"""
FILE_TYPES = {int(code): name for code, name in zip(*[iter(_FILE_TYPES.split())] * 2, strict=True)}
"""`general.file_type`, a recipe that gives tensors different types -> its name (llama.cpp, `llama_ftype`)"""


@dataclass(frozen=True, eq=False)
class Array:
    """An array in the metadata that has not been decoded."""

    kind: int
    """Type code of its elements"""
    count: int
    start: int
    """Its first byte in the file"""
    stop: int
    starts: NDArray[np.uint32] | None = None
    """Beginnings of its strings, and the last one's end, after `start`, if each has less than 256 bytes. [count + 1]"""


@dataclass(frozen=True)
class Located:
    """A tensor's place in a file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in all of minillm"""
    type: Type
    offset: int
    """In bytes from the start of the file"""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) // self.type.numbers * self.type.bytes


@dataclass(frozen=True)
class GGUF:
    """The header of a GGUF file, checked."""

    path: Path
    metadata: Mapping[str, Any]
    """bool, int, float, str, or `Array`"""
    tensors: Mapping[str, Located]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The metadata entry of this key, `default` if absent.

        Raises:
            CheckpointError: it is not of this kind (int, float, bool or str; float accepts int).
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            stored = "an array" if isinstance(value, Array) else repr(value)
            raise CheckpointError(f"{self.path}: {key:.80} should be of type {kind.__name__}, found {stored:.60}")
        return value

    def strings(self, key: str) -> list[str] | None:
        """The array of strings of this key; None if absent.

        Raises:
            CheckpointError: it is not an array of strings, or not UTF-8.
        """
        located = self._array(key, lambda kind: kind == _STRING, "strings")
        if located is None:
            return None
        array, data = located
        texts: list[str] = []
        if array.starts is not None:  # one call decodes and another splits
            with suppress(UnicodeDecodeError):
                texts = _joined(data, array.starts).decode().split("\0")[1:]
            if len(texts) == array.count:  # none has a NUL
                return texts
        texts, at, length = [], 0, struct.Struct("<Q").unpack_from
        try:
            for _ in range(array.count):
                stop = at + 8 + length(data, at)[0]
                texts.append(str(data[at + 8 : stop], "utf-8"))
                at = stop
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {key:.80} should be UTF-8, entry {len(texts)} is not") from None
        return texts

    def few_strings(self, key: str, indices: Collection[int]) -> dict[int, str]:
        """Some strings of the array of this key, by their indices; those beyond its end are left out.

        Raises:
            CheckpointError: as `strings`.
        """
        located = self._array(key, lambda kind: kind == _STRING, "strings")
        if located is None:
            return {}
        array, data = located
        starts = array.starts
        if starts is None:
            texts = self.strings(key) or []
            return {i: texts[i] for i in indices if i < array.count}
        try:
            return {i: data[starts[i] + 8 : starts[i + 1]].decode() for i in indices if i < array.count}
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {key:.80} should be UTF-8") from None

    def names(self, key: str) -> Names | None:
        """The strings of this key as `Names`; None if there are none, or one is empty or long, or they are not unique.

        Raises:
            CheckpointError: as `strings`.
        """
        located = self._array(key, lambda kind: kind == _STRING, "strings")
        if located is None or (starts := located[0].starts) is None:
            return None
        joined, lengths = _joined(located[1], starts), np.diff(starts).astype(np.int64) - 8
        try:
            joined.decode()
        except UnicodeDecodeError:
            return None
        names = Names(joined, np.cumsum(lengths + 1) - lengths, lengths)
        return names if names.unique and lengths.all() else None

    def length(self, key: str) -> int:
        """Number of elements in the array of this key; 0 if it is none."""
        array = self.metadata.get(key)
        return array.count if isinstance(array, Array) else 0

    def numbers(self, key: str) -> NDArray[Any] | None:
        """The array of numbers of this key; None if absent.

        Raises:
            CheckpointError: it is not an array of numbers.
        """
        located = self._array(key, _SCALARS.__contains__, "numbers")
        return None if located is None else np.frombuffer(located[1], _SCALARS[located[0].kind])

    def token_ids(self, count: int) -> dict[str, int]:
        """The ids of named tokens, "bos", "eos", "unknown", "padding", "eot" and "eom", of `count` that there are."""
        ids = {name: self.get(f"tokenizer.ggml.{name}_token_id", int) for name in NAMED_TOKENS}
        return {name: i for name, i in ids.items() if i is not None and 0 <= i < count}

    def end_ids(self, count: int) -> list[int]:
        """The ids that end a text, a turn or a message, of `count` that there are."""
        ids = self.token_ids(count)
        return list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if name in ids))

    def _array(self, key: str, accepts: Any, what: str) -> tuple[Array, bytes] | None:
        array = self.metadata.get(key)
        if array is None:
            return None
        if not isinstance(array, Array) or not accepts(array.kind):
            raise CheckpointError(f"{self.path}: {key:.80} should be an array of {what}")
        return array, WeightFile(self.path).read(array.start, array.stop - array.start)


def _short_strings(data: Any, start: int, limit: int, count: int) -> NDArray[np.uint32] | None:
    """`Array.starts` of strings, None if one has 256 bytes or more.

    Args:
        data: bytes, or a map of them
        start: the first string
        limit: the end of what may be read
        count: number of strings
    """
    if 8 * count > limit - start:
        return None
    at, places = start, np.zeros(count + 1, np.uint32)
    starts = places.data
    try:
        for i in range(1, count + 1):
            at += 8 + data[at]
            starts[i] = at - start
    except (IndexError, ValueError):  # beyond the data, or 4 GiB
        return None
    if at > limit:
        return None
    numbers = np.frombuffer(data, np.uint8, limit)[start:]
    return None if any(numbers[places[:-1] + i].any() for i in range(1, 8)) else places  # other bytes of the lengths


def _joined(data: bytes, starts: NDArray[np.uint32]) -> bytes:
    """The strings of an array by their `starts`, a NUL before each."""
    text, inside = np.frombuffer(data, np.uint8).copy(), np.ones(len(data), bool)
    text[starts[:-1]] = 0
    for i in range(1, 8):
        inside[starts[:-1] + i] = False
    return text[inside].tobytes()


def is_gguf(path: Path) -> bool:
    """True if the path is a GGUF file: by its name, or by its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    return WeightFile(path).size >= len(MAGIC) and WeightFile(path).read(0, len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GGUF:
    """The header of a file; for any of several shards ("-00001-of-00003.gguf"), the first one's.

    Raises:
        CheckpointError: the file is truncated, damaged, or no GGUF file.
        UnsupportedModelError: it is big-endian, of another version, or holds a type of tensor that is not known.
    """
    if _SHARD.fullmatch(path.name):
        path = path.with_name(all_shards(path.name)[0])
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return _parse(path, status.st_size, status.st_mtime_ns)


def read_shards(first: GGUF) -> list[GGUF]:
    """The headers of all files of a model; `read_gguf` has read the first.

    Raises:
        CheckpointError: a shard is missing or damaged, or two hold a tensor of the same name.
        UnsupportedModelError: as `read_gguf`.
    """
    count = first.get("split.count", int, 1)
    shard = _SHARD.fullmatch(first.path.name)
    if count <= 1:
        return [first]
    if shard is None or int(shard["count"]) != count:
        raise CheckpointError(
            f"{first.path} is the first of {count} files, whose names should end in -00001-of-{count:05}.gguf and so on"
        )
    paths = [first.path.with_name(name) for name in all_shards(first.path.name)[1:]]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(f"{first.path} is the first of {count} files, and {missing[0]} is missing")
    every = [first, *(_parse(path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)]
    names: dict[str, Path] = {}
    for gguf in every:
        for name in gguf.tensors:
            if name in names:
                raise CheckpointError(f"tensor {name!r:.80} is both in {names[name]} and in {gguf.path}")
            names[name] = gguf.path
    return every


def choose_file(names: list[str], folder: str) -> str | None:
    """The GGUF file of a folder's or repository's file names; shards count as one; None if there is none.

    Raises:
        CheckpointError: there are several.
    """
    files = sorted(name for name in names if name.lower().endswith(".gguf"))
    firsts = [name for name in files if (m := _SHARD.fullmatch(name)) is None or int(m["number"]) == 1]
    if len(firsts) > 1:
        raise CheckpointError(f"{folder} holds several GGUF files: name one of {', '.join(firsts)}")
    if files and not firsts:
        raise CheckpointError(f"{folder} holds {files[0]} without the first of its files, -00001-of-")
    return firsts[0] if firsts else None


def all_shards(name: str) -> list[str]:
    """The names of all files of the model in a GGUF file, by its name; the first comes first."""
    shard = _SHARD.fullmatch(name)
    if shard is None:
        return [name]
    return [f"{shard['stem']}-{i:05}-of-{shard['count']}.gguf" for i in range(1, int(shard["count"]) + 1)]


@lru_cache(maxsize=4)  # the model, its tokenizer and its template each ask; of arrays it keeps where strings begin
def _parse(path: Path, size: int, changed: int) -> GGUF:
    """Read and check a header; `size` and `changed` (nanoseconds) tell versions of the file apart."""
    file = WeightFile(path)
    header = _Header(file)
    tensor_count, entry_count = header.number("<u8"), header.number("<u8")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = header.text()
        if key in metadata:
            raise CheckpointError(f"{path} has the metadata entry {key!r:.80} twice")
        metadata[key] = header.value(header.number("<u4"), key)
    tensors: dict[str, Located] = {}
    for _ in range(tensor_count):
        tensor = header.tensor()
        if tensor.name in tensors:
            raise CheckpointError(f"{path} has the tensor {tensor.name!r:.80} twice")
        tensors[tensor.name] = tensor
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment should be a power of two, found {alignment!r:.60}")
    start = -(-header.at // alignment) * alignment
    file.check_unchanged()
    return GGUF(path, metadata, _placed(path, tensors, start, alignment, size))


def _placed(path: Path, tensors: Mapping[str, Located], start: int, alignment: int, size: int) -> dict[str, Located]:
    """The tensors with offsets from the start of the file; none overlap or leave it."""
    placed = {name: Located(name, tensor.shape, tensor.type, start + tensor.offset) for name, tensor in tensors.items()}
    end, before = 0, ""  # without tensors nothing has to follow the header, nor the padding after it
    for tensor in sorted(placed.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if (tensor.offset - start) % alignment:
            raise CheckpointError(f"{path}: tensor {tensor.name!r:.80} is not aligned to {alignment} bytes")
        if tensor.offset < end:
            raise CheckpointError(f"{path}: tensors {before!r:.80} and {tensor.name!r:.80} overlap")
        end, before = tensor.offset + tensor.nbytes, tensor.name
    if end > size:
        raise CheckpointError(
            f"{path} is truncated: tensor {before!r:.80} ends at byte {end}, the file at {size}: fetch it again"
        )
    return placed


class _Header:
    """Reads a header, which is mapped, from its beginning; no length in it is believed beyond the end of the file."""

    def __init__(self, file: WeightFile) -> None:
        """Read magic and version.

        Raises:
            CheckpointError, UnsupportedModelError: not what is read here.
        """
        self.at = 0
        """Bytes read so far"""
        self._path, self._size = file.path, file.size
        self._data: bytes | mmap.mmap = file.mapping if file.size else b""
        if self._size < len(MAGIC) or self._take(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: its first bytes should be {MAGIC.decode()}")
        version = self.number("<u4")
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModelError(f"{self._path} is a big-endian GGUF file; minillm reads little-endian ones")
        if version not in VERSIONS:
            raise UnsupportedModelError(
                f"{self._path} is a GGUF file of version {version}; minillm reads {' and '.join(map(str, VERSIONS))}"
            )

    def number(self, dtype: str) -> Any:
        """A scalar as a Python number."""
        kind = np.dtype(dtype)
        return np.frombuffer(self._take(kind.itemsize), kind)[0].item()

    def text(self) -> str:
        """A string: its length and its bytes.

        Raises:
            CheckpointError: it is not UTF-8.
        """
        data = self._take(self.number("<u8"))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._path}: the text {data[:40]!r} in its header is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        """A metadata entry's value; an array is skipped and located.

        Raises:
            CheckpointError: the type is unknown, or an array of arrays.
        """
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self._path}: {key!r:.80} has the type {kind}, which GGUF does not know")
        inside, count = self.number("<u4"), self.number("<u8")
        if inside not in _SCALARS and inside != _STRING:
            raise CheckpointError(
                f"{self._path}: {key!r:.80} is an array of type {inside}; expected scalars or strings"
            )
        start, starts = self.at, None
        if inside == _STRING:
            starts = self._skip_strings(count)
        else:
            self._take(count * np.dtype(_SCALARS[inside]).itemsize)
        return Array(inside, count, start, self.at, starts)

    def tensor(self) -> Located:
        """A tensor's entry, with its offset from the start of the data.

        Raises:
            CheckpointError: its shape is none, or its rows are not whole blocks.
            UnsupportedModelError: its type is unknown.
        """
        name = self.text()
        dimensions = self.number("<u4")
        if dimensions > MOST_DIMENSIONS:
            raise CheckpointError(
                f"{self._path}: tensor {name!r:.80} has {dimensions} dimensions, expected {MOST_DIMENSIONS} at most"
            )
        shape = tuple(self.number("<u8") for _ in range(dimensions))[::-1]
        code, offset = self.number("<u4"), self.number("<u8")
        if code not in TYPES:
            raise UnsupportedModelError(
                f"{self._path}: tensor {name!r:.80} has type {code}, which minillm does not know"
            )
        if not shape or not is_shape(shape) or shape[-1] % TYPES[code].numbers or offset >= 2**60:
            raise CheckpointError(
                f"{self._path}: tensor {name!r:.80} of type {TYPES[code].name} at {offset} has the shape "
                f"{list(shape)!r:.80}, which it cannot have"
            )
        return Located(name, shape, TYPES[code], offset)

    def _skip_strings(self, count: int) -> NDArray[np.uint32] | None:
        """Go on behind `count` strings. -> `Array.starts`"""
        end = min(self._size, HEADER_LIMIT)
        if (starts := _short_strings(self._data, self.at, end, count)) is not None:
            self.at += int(starts[-1])
            return starts
        at, limit, length = self.at, min(self._size, HEADER_LIMIT), struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > limit:
                self._check_end(at + 8)
            at += 8 + length(self._data, at)[0]
        self._check_end(at)
        self.at = at
        return None

    def _take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        self._check_end(self.at)
        return self._data[start : self.at]

    def _check_end(self, end: int) -> None:
        """Refuse a header that goes on to byte `end`, if that is beyond the file."""
        if end > self._size:
            raise CheckpointError(
                f"{self._path} is truncated or damaged: its header goes beyond its end: fetch it again"
            )
        if end > HEADER_LIMIT:
            raise CheckpointError(f"{self._path} is damaged: its header is longer than {HEADER_LIMIT // 2**20} MiB")
