"""The file that `torch.save` writes since version 1.6: a zip archive of a pickle and one plain entry per storage.

    name/data.pkl      which tensors there are: storage, offset, shape, strides
    name/byteorder     "little" or "big"; older files lack it and are little
    name/data/<key>    the bytes of one storage, which several tensors may share

Source: torch/serialization.py, `_save`, and torch/_utils.py. The file is untrusted: every number in it is checked
against the size of the data it refers to before it is used.

A pickle is a program, which may import and call anything. `_Unpickler` runs only the instructions that `torch.save`
writes for dictionaries of tensors, and knows nineteen names: a tensor becomes a record of its storage, offset, shape
and strides, which `_Archive` checks. It is Python's own unpickler in Python: the one in C allocates 16 GB for a memo
index of four bytes, and hashes a deeply nested key until the stack overflows.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..errors import CheckpointError
from .tensors import StoredTensor, WeightFile, extent, is_count, is_shape


@dataclass(frozen=True)
class StorageType:
    """Element type and size of a storage class such as torch.FloatStorage."""

    dtype: str
    itemsize: int


class TensorNote(NamedTuple):
    """Unchecked arguments of `_rebuild_tensor_v2`: each field may be anything that a pickle can hold."""

    storage: object
    offset: object
    shape: object
    strides: object
    requires_grad: object
    hooks: object


class Dictionary(dict[Any, Any]):
    """A dictionary in the pickle. Its keys are text or numbers: hashing a deeply nested tuple overflows the C stack."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()

    def __setitem__(self, key: object, value: object) -> None:
        if type(key) not in (str, int):
            raise _RefusedError(f"has a dictionary key of type {type(key).__name__}")
        super().__setitem__(key, value)


class _RefusedError(Exception):
    """The pickle asks for something that a dictionary of tensors does not need."""


def _without_attributes(rebuild: object, kind: object, arguments: Any, attributes: object) -> TensorNote:
    """A tensor with attributes of its own, which are not read.

    Raises:
        _RefusedError: it is made by another function, or is of another class.
    """
    if rebuild is not TensorNote or not isinstance(kind, _TensorClass):
        raise _RefusedError("holds a tensor of a class of its own")
    return TensorNote(*arguments)


class _TensorClass:
    """A class of tensors in the pickle; nothing is made of it."""

    __slots__ = ()


_GLOBALS: dict[str, object] = {
    "collections.OrderedDict": Dictionary,
    "torch._utils._rebuild_tensor_v2": TensorNote,
    "torch._utils._rebuild_parameter": lambda data, requires_grad, hooks: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, requires_grad, hooks, attributes: data,
    "torch._tensor._rebuild_from_type_v2": _without_attributes,
    "torch.Tensor": _TensorClass(),
    "torch.nn.parameter.Parameter": _TensorClass(),
    "torch.DoubleStorage": StorageType("float64", 8),
    "torch.FloatStorage": StorageType("float32", 4),
    "torch.HalfStorage": StorageType("float16", 2),
    "torch.BFloat16Storage": StorageType("bfloat16", 2),
    "torch.LongStorage": StorageType("int64", 8),
    "torch.IntStorage": StorageType("int32", 4),
    "torch.ShortStorage": StorageType("int16", 2),
    "torch.CharStorage": StorageType("int8", 1),
    "torch.ByteStorage": StorageType("uint8", 1),
    "torch.BoolStorage": StorageType("bool", 1),
    "torch.ComplexFloatStorage": StorageType("complex64", 8),
    "torch.ComplexDoubleStorage": StorageType("complex128", 16),
}
# Each of them pushes, pops or stores what is on the stack, or calls a method that `_Unpickler` defines. REDUCE calls
# what is on the stack: nothing there can be called but the first five of `_GLOBALS`.
_INSTRUCTIONS = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINFLOAT, pickle.BINUNICODE, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2),
    *(pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.GLOBAL, pickle.BINPERSID, pickle.REDUCE),
)
_MALFORMED = (pickle.UnpicklingError, AttributeError, EOFError, IndexError, TypeError, ValueError, struct.error)
"""Exceptions of Python's unpickler for a pickle that breaks off, or does something that its objects cannot do."""


class _Unpickler(pickle._Unpickler):
    """Python's unpickler without the instructions that could run code or fill the memory."""

    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, data: bytes, find_storage: Callable[[object], object]) -> None:
        super().__init__(io.BytesIO(data), fix_imports=False)
        self.find_storage = find_storage

    def find_class(self, module: str, name: str) -> object:
        """One of `_GLOBALS`; nothing is imported."""
        if f"{module}.{name}" not in _GLOBALS:
            raise _RefusedError(f"asks for {module}.{name}")
        return _GLOBALS[f"{module}.{name}"]

    def persistent_load(self, pid: object) -> object:
        """The storage of a persistent id."""
        return self.find_storage(pid)

    def push_dictionary(self) -> None:
        """EMPTY_DICT."""
        self.stack.append(Dictionary())

    def discard_state(self) -> None:
        """BUILD: sets an OrderedDict's attributes, where torch stores version numbers of modules."""
        self.stack.pop()
        if type(self.stack[-1]) is not Dictionary:
            raise _RefusedError(f"sets attributes of a {type(self.stack[-1]).__name__}")

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in _INSTRUCTIONS},
        pickle.EMPTY_DICT[0]: push_dictionary,
        pickle.BUILD[0]: discard_state,
    }


def read_pickle(data: bytes, find_storage: Callable[[object], object], where: str) -> object:
    """The object in a pickle, made only of None, bool, int, float, str, tuple, list, Dictionary and TensorNote.

    Args:
        data: the pickle, protocol 2.
        find_storage: persistent id -> value of `TensorNote.storage`.
        where: the file, for error messages.

    Raises:
        CheckpointError: the pickle is malformed, holds an instruction that `torch.save` does not write for tensors, or
            names anything but tensors; the message says which.
    """
    machine = _Unpickler(data, find_storage)
    try:
        value = machine.load()
    except (_RefusedError, KeyError) as error:
        asked = f"uses the pickle instruction {error.args[0]:#04x}" if isinstance(error, KeyError) else error
        raise CheckpointError(
            f"{where} {asked}, which a dictionary of tensors does not need; nothing of it was run. "
            "If you trust the file, load it with torch and save its tensors as safetensors"
        ) from None
    except _MALFORMED as error:
        raise CheckpointError(f"{where} is damaged, or holds more than tensors: {error!s:.200}") from error
    if machine.stack or machine.metastack:
        raise CheckpointError(f"{where} is damaged: its pickle ends too early")
    return value


_MAX_PICKLE = 16 * 2**20  # about 100,000 tensors
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the pickled magic number of torch before 1.6


def read_torch_zip(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one `pytorch_model.bin` by name. Reads the archive's directory and the pickle, executing nothing.

    Raises:
        CheckpointError: the file is not such an archive, is truncated or unsafe, or holds anything but named tensors.
    """
    archive = _Archive(WeightFile(path))
    contents = read_pickle(archive.read("data.pkl", _MAX_PICKLE), archive.storage, str(path))
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} holds a {type(contents).__name__}, expected a dictionary of tensors by name")
    tensors = {}
    for name, value in contents.items():
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
    """A storage checked to be within the file."""

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
        """Offset and size of an entry in the file, in bytes."""
        where = f"the entry {name!r} of {self.path}"
        info = self.entries.get(self.root + name)
        if info is None:
            raise CheckpointError(f"{where} is missing")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise CheckpointError(f"{where} is compressed or encrypted; torch.save stores the bytes as they are")
        # The local header repeats the name and may have its own extra field: their lengths are not in the directory.
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
        """The storage for the pickle's ("storage", type, key, location, number of elements)."""
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
        """The tensor that a note describes, checked to be within its storage."""
        match note:
            case TensorNote(_Storage() as storage, offset, tuple(shape), tuple(strides), _, _):
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
    """True if elements do not overlap: each stride exceeds the extent of all axes of smaller stride.

    So no view is larger than its storage, and no byte is read twice.
    """
    reach = 1
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n > 1:
            if stride < reach:
                return False
            reach += (n - 1) * stride
    return True
