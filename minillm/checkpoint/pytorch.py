"""The file that `torch.save` writes since version 1.6: a zip archive of a pickle and one plain entry per storage.

    name/data.pkl      which tensors there are: storage, offset, shape, strides
    name/byteorder     "little" or "big"; older files lack it and are little
    name/data/<key>    the bytes of one storage, which several tensors may share

Source: torch/serialization.py, `_save`. The file is untrusted: every number in it is checked against the size of the
data it refers to before it is used.

The pickle is parsed as data and never executed.

A pickle is a program for a stack machine, and Python's own machine imports and calls whatever the program names. Even
with its imports restricted it can be made to fill the memory (one memo index of four bytes is enough). This machine
supports only the instructions that `torch.save` writes for dictionaries of tensors, knows fifteen names, and calls none
of them: a tensor becomes a record of its storage, offset, shape and strides, which the caller checks.

Instructions: Lib/pickletools.py of CPython. Output of torch.save: torch/serialization.py and torch/_utils.py.
"""

import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .tensors import StoredTensor, WeightFile, extent, is_count, is_shape


@dataclass(frozen=True)
class StorageType:
    """Element type and size of a storage class such as torch.FloatStorage."""

    dtype: str
    itemsize: int


@dataclass(frozen=True)
class TensorNote:
    """Unchecked description of one tensor from the pickle: each field may be anything a pickle can hold."""

    storage: object
    offset: object
    shape: object
    strides: object


class _Callable(Enum):
    ORDERED_DICT = "collections.OrderedDict"
    TENSOR = "torch._utils._rebuild_tensor_v2"
    PARAMETER = "torch._utils._rebuild_parameter"


_GLOBALS: dict[str, object] = {
    **{name.value: name for name in _Callable},
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
# Instructions that push their argument, and those that push a constant.
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
_CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(data: bytes, find_storage: Callable[[object], object], where: str) -> object:
    """The object that `data` describes, made only of None, bool, int, float, str, tuple, list, dict and TensorNote.

    Args:
        data: the pickle, protocol 2.
        find_storage: persistent id -> value of `TensorNote.storage`.
        where: the file, for error messages.

    Raises:
        CheckpointError: the pickle is malformed, holds an instruction that `torch.save` does not write for tensors, or
            names anything but tensors; the message says which.
    """
    machine = _Machine(find_storage, where)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                break
            machine.step(opcode.name, argument)
        [result] = machine.stack
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{where} is damaged: its pickle cannot be read ({error})") from error
    return result


class _Machine:
    """Pickle interpreter: the stack, the stacks saved by MARK, and the memo."""

    def __init__(self, find_storage: Callable[[object], object], where: str) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.find_storage = find_storage
        self.where = where
        self.handlers: dict[str, Callable[[Any], None]] = {
            "PROTO": lambda version: None,
            "MARK": self.mark,
            "BINPUT": self.put,
            "LONG_BINPUT": self.put,
            "BINGET": self.get,
            "LONG_BINGET": self.get,
            "TUPLE": lambda _: self.push(tuple(self.pop_to_mark())),
            "APPEND": lambda _: self.append([self.stack.pop()]),
            "APPENDS": lambda _: self.append(self.pop_to_mark()),
            "SETITEM": lambda _: self.set_items(self.pop(2)),
            "SETITEMS": lambda _: self.set_items(self.pop_to_mark()),
            "GLOBAL": self.find_global,
            "BINPERSID": lambda _: self.push(self.find_storage(self.stack.pop())),
            "REDUCE": self.reduce,
            "BUILD": self.build,
        }

    def step(self, name: str, argument: Any) -> None:
        """Execute one instruction."""
        if name in _LITERALS:
            self.push(argument)
        elif name in _CONSTANTS:
            self.push(_CONSTANTS[name]())
        elif name in _TUPLES:
            self.push(tuple(self.pop(_TUPLES[name])))
        elif name in self.handlers:
            self.handlers[name](argument)
        else:
            raise self.refusal(f"uses the pickle instruction {name}")

    def refusal(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where} {what}, which a dictionary of tensors does not need; nothing of it was run. "
            "If you trust the file, load it with torch and save its tensors as safetensors"
        )

    def push(self, item: Any) -> None:
        self.stack.append(item)

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def mark(self, _: None) -> None:
        self.below.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.below.pop()
        return items

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.push(self.memo[index])

    def append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise self.refusal(f"appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not dict:
            raise self.refusal(f"sets items of a {type(self.stack[-1]).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int):  # hashing a deeply nested tuple would overflow the C stack
                raise self.refusal(f"has a dictionary key of type {type(key).__name__}")
            self.stack[-1][key] = value

    def find_global(self, argument: str) -> None:
        name = argument.replace(" ", ".")  # pickletools joins module and name with a space
        if name not in _GLOBALS:
            raise self.refusal(f"asks for {name}")
        self.push(_GLOBALS[name])

    def reduce(self, _: None) -> None:
        """REDUCE, which would be a call: build a dict or a `TensorNote` instead."""
        function, arguments = self.pop(2)
        match function, arguments:
            case _Callable.ORDERED_DICT, ():
                self.push({})
            case _Callable.TENSOR, (storage, offset, shape, strides, _requires_grad, _hooks):
                self.push(TensorNote(storage, offset, shape, strides))
            case _Callable.PARAMETER, (TensorNote() as note, _requires_grad, _hooks):
                self.push(note)
            case _Callable(), _:
                raise self.refusal(f"calls {function.value} with unusual arguments")
            case _:
                raise self.refusal(f"calls a {type(function).__name__}")

    def build(self, _: None) -> None:
        """BUILD: discard an OrderedDict's attributes, where torch stores version numbers of modules."""
        target, _state = self.pop(2)
        if type(target) is not dict:
            raise self.refusal(f"sets attributes of a {type(target).__name__}")
        self.push(target)


_MAX_PICKLE = 16 * 2**20  # about 100,000 tensors
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the pickled magic number of torch before 1.6


def read_torch_zip(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one `pytorch_model.bin` by name. Reads the archive's directory and the pickle, executing nothing.

    Raises:
        CheckpointError: the file is not such an archive, is truncated or unsafe, or holds anything but named tensors.
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
