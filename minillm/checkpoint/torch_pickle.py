"""The pickle inside a PyTorch checkpoint, read as data: it is taken apart, never run.

A pickle is a program for a stack machine, and Python's own machine imports and calls whatever the program names. Even
with its imports restricted it can be made to fill the memory (one memo index of four bytes is enough). This machine
has only the instructions that `torch.save` writes for dictionaries of tensors, knows fifteen names, and calls none
of them: a tensor becomes a note of its storage, offset, shape and strides, which the caller checks.

Instructions: Lib/pickletools.py of CPython. What torch.save writes: torch/serialization.py and torch/_utils.py.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import CheckpointError


@dataclass(frozen=True)
class StorageType:
    """A name such as torch.FloatStorage: the type of the elements and the bytes that each takes."""

    dtype: str
    itemsize: int


@dataclass(frozen=True)
class TensorNote:
    """What the pickle says of one tensor. None of it is checked yet: each field may be anything a pickle can hold."""

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
# The instructions that push their argument, and those that push a constant.
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
    """The object that `data` describes, made of None, bool, int, float, str, tuple, list, dict and TensorNote alone.

    Args:
        data: the pickle, protocol 2.
        find_storage: persistent id -> what to put into `TensorNote.storage`.
        where: the file, for messages.

    Raises:
        CheckpointError: the pickle is malformed, holds an instruction that `torch.save` does not write for tensors, or
            names anything beside tensors; the message says which.
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
    """The stack, the stacks below it that a MARK set aside, and the memo."""

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
        """Carry out one instruction."""
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
        """What would be a call."""
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
        """An OrderedDict's attributes: torch keeps version numbers of modules there. Nobody needs them."""
        target, _state = self.pop(2)
        if type(target) is not dict:
            raise self.refusal(f"sets attributes of a {type(target).__name__}")
        self.push(target)
