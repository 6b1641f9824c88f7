"""The file that `torch.save` writes since version 1.6: a zip archive of a pickle and one plain entry per storage.

    name/data.pkl      which tensors there are: storage, offset, shape, strides (torch_pickle.py)
    name/byteorder     "little" or "big"; older files lack it and are little
    name/data/<key>    the bytes of one storage, which several tensors may share

Source: torch/serialization.py, `_save`. The file is read as coming from a stranger: no number in it is used before it
is held against the size of what it points into.
"""

import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .tensors import StoredTensor, WeightFile, extent, is_count, is_shape
from .torch_pickle import StorageType, TensorNote, read_pickle

_MAX_PICKLE = 16 * 2**20  # about 100,000 tensors
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the pickled magic number of torch before 1.6


def read_torch_zip(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one `pytorch_model.bin` by name. Reads the archive's directory and the pickle, runs neither.

    Raises:
        CheckpointError: the file is no such archive, truncated, unsafe, or holds something else than named tensors.
    """
    archive = _Archive(WeightFile(path))
    found = read_pickle(archive.read("data.pkl", _MAX_PICKLE), archive.storage, str(path))
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, expected a dictionary of tensors by name")
    tensors = {}
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, TensorNote):
            what = "tensor" if isinstance(value, TensorNote) else type(value).__name__
            raise CheckpointError(
                f"{path} holds a {what} under {name!r}, expected a flat dictionary of tensors by name: "
                "save the model's state_dict() alone"
            )
        tensors[name] = archive.tensor(name, value)
    return tensors


@dataclass(frozen=True)
class _Storage:
    """A storage that is known to lie within the file."""

    kind: StorageType
    offset: int  # bytes
    count: int  # elements


class _Archive:
    """The entries of the zip archive, as ranges of the file.

    `zipfile` reads the directory only; the bytes are read, or mapped, from the file itself.
    """

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self.path = file.path
        head = file.read(0, min(file.size, len(_OLD_FORMAT)))
        if head == _OLD_FORMAT:
            raise CheckpointError(
                f"{self.path} is in the format that torch wrote before version 1.6, which minillm does not read; "
                f"convert it once with torch: torch.save(torch.load(path, weights_only=True), path)"
            )
        try:
            with file.opened() as handle, zipfile.ZipFile(handle) as archive:
                self.entries = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, EOFError, struct.error) as error:
            state = "is truncated or damaged" if head.startswith(b"PK") else "is no zip archive as torch.save writes"
            raise CheckpointError(f"{self.path} {state}: {error}") from error
        roots = [name.removesuffix("data.pkl") for name in self.entries if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise CheckpointError(f"{self.path} holds {len(roots)} entries data.pkl, expected one as torch.save writes")
        self.root = roots[0]
        if self.root + "byteorder" in self.entries and self.read("byteorder", 16) != b"little":
            raise CheckpointError(
                f"{self.path} was written in big-endian byte order; minillm reads little-endian files"
            )

    def entry(self, name: str) -> tuple[int, int]:
        """Where the bytes of an entry start in the file, and how many they are."""
        where = f"the entry {name!r} of {self.path}"
        info = self.entries.get(self.root + name)
        if info is None:
            raise CheckpointError(f"{where} is missing")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise CheckpointError(f"{where} is compressed or encrypted; torch.save stores the bytes as they are")
        # The local header repeats the name and may have its own extra field: the directory does not tell their lengths.
        start = info.header_offset + 30
        if not 30 <= start <= self.file.size:
            raise CheckpointError(f"{where} lies outside the file: the archive is damaged")
        header = self.file.read(start - 30, 30)
        start += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        if header[:4] != b"PK\x03\x04" or start + info.file_size > self.file.size:
            raise CheckpointError(f"{where} lies outside the file or has no header: the archive is damaged")
        return start, info.file_size

    def read(self, name: str, limit: int) -> bytes:
        """The bytes of a small entry."""
        start, size = self.entry(name)
        if size > limit:
            raise CheckpointError(f"the entry {name!r} of {self.path} has {size} bytes, expected {limit} at most")
        return self.file.read(start, size)

    def storage(self, persistent_id: object) -> _Storage:
        """The storage that the pickle means by ("storage", type, key, location, number of elements)."""
        match persistent_id:
            case ("storage", StorageType() as kind, str(key), str(), count) if is_count(count):
                start, size = self.entry(f"data/{key}")
            case _:
                raise CheckpointError(f"{self.path} refers to something that is no storage of a tensor")
        if size != count * kind.itemsize:
            raise CheckpointError(
                f"storage {key!r} of {self.path} has {size} bytes, expected {count * kind.itemsize} "
                f"for {count} elements of {kind.dtype}"
            )
        return _Storage(kind, start, count)

    def tensor(self, name: str, note: TensorNote) -> StoredTensor:
        """The tensor that a note describes, once it is shown to stay within its storage."""
        match note:
            case TensorNote(_Storage() as storage, offset, tuple(shape), tuple(strides)):
                pass
            case _:
                raise CheckpointError(f"tensor {name!r} in {self.path} has no storage, shape or strides")
        if not is_count(offset) or not is_shape(shape) or not all(map(is_count, strides)) or len(shape) != len(strides):
            raise CheckpointError(f"tensor {name!r} in {self.path} has an impossible offset, shape or strides")
        needed = 0 if 0 in shape else extent(shape, strides)
        if offset + needed > storage.count:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} reaches to element {offset + needed} of a storage of {storage.count}"
            )
        if needed and not _elements_are_apart(shape, strides):
            raise CheckpointError(
                f"tensor {name!r} in {self.path} has shape {list(shape)} and strides {list(strides)}, so that "
                "elements share memory: save it with .contiguous()"
            )
        kind = storage.kind
        return StoredTensor(name, shape, kind.dtype, self.file, storage.offset + offset * kind.itemsize, strides)


def _elements_are_apart(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether each axis steps over everything that the axes of smaller stride reach.

    So no view is larger than its storage, and reading it never reads a byte twice.
    """
    reach = 1
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n > 1:
            if stride < reach:
                return False
            reach += (n - 1) * stride
    return True
