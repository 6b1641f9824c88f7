"""A kernel's arguments, held to its C++ signature. Stricter than CuPy, which passes whatever bytes it is given."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = {
    "f": "f",
    "i": "i",
    "u": "u",
    "b": "u",
    "V": "V",
}  # NumPy's kind -> the signature's; bool is an unsigned byte


@dataclass(frozen=True)
class Parameter:
    """One parameter as include/launch.h describes it: `const *f4` is `const float*`, `i4` is `int`."""

    text: str

    @property
    def is_pointer(self) -> bool:
        return "*" in self.text

    @property
    def is_const(self) -> bool:
        return self.text.startswith("const")

    @property
    def element(self) -> str:
        """Kind and size of what it points to, or of the value itself; `V1` is void."""
        return self.text.rpartition("*")[2]


def parse_signature(text: str) -> tuple[Parameter, ...]:
    """The parameters of a kernel from `f4,const *f4,`."""
    return tuple(Parameter(part) for part in text.split(",") if part)


def element_of(dtype: np.dtype[Any]) -> str:
    """The signature's name of a NumPy type; bfloat16 comes from ml_dtypes."""
    if dtype.name == "bfloat16":
        return "b2"
    return f"{KINDS.get(dtype.kind, '?')}{dtype.itemsize}"


def check(kernel: str, parameters: Sequence[Parameter], arguments: Sequence[Any]) -> None:
    """Hold arguments to a kernel's parameters.

    Raises:
        TypeError: an argument is missing, or is not exactly what its parameter wants.
    """
    if len(arguments) != len(parameters):
        raise TypeError(f"{kernel} takes {len(parameters)} arguments, {len(arguments)} were given")
    for position, (parameter, argument) in enumerate(zip(parameters, arguments, strict=True)):
        if reason := _mismatch(parameter, argument):
            raise TypeError(f"{kernel}, argument {position} ({parameter.text}): {reason}")


def is_array(argument: Any) -> bool:
    """Whether an argument is passed by its address; an array of no dimensions is a structure, passed by value."""
    return isinstance(argument, np.ndarray) and argument.ndim > 0


def pack(arguments: Sequence[Any], address: Callable[[Any], int]) -> tuple[Any, Any]:
    """The array of pointers to values that a launch takes, and the values, which must live until it has run."""
    values = (ctypes.c_uint64 * len(arguments))()
    pointers = (ctypes.c_void_p * len(arguments))()
    for i, argument in enumerate(arguments):
        pointers[i] = ctypes.addressof(values) + 8 * i
        if is_array(argument):
            values[i] = address(argument)
        elif isinstance(argument, np.ndarray):
            pointers[i] = address_of(argument)
        else:
            values[i] = int(argument.view(f"u{argument.itemsize}"))
    return pointers, (values, arguments)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Address of an array's first element."""
    return int(array.__array_interface__["data"][0])


def _mismatch(parameter: Parameter, argument: Any) -> str | None:
    if is_array(argument):
        if not parameter.is_pointer:
            return "an array was given for a number"
        if parameter.element[0] != "V" and element_of(argument.dtype) != parameter.element:
            return f"an array of {argument.dtype} was given"
        if not parameter.is_const and not argument.flags.writeable:
            return "an array that must not be written was given"
        return None
    if not isinstance(argument, np.generic | np.ndarray):
        return f"a Python {type(argument).__name__} was given; CuPy passes it as 8 bytes. Give a NumPy number"
    if parameter.is_pointer:
        is_null = argument.dtype.kind in "iu" and argument.itemsize == 8 and argument == 0
        return None if is_null else f"{argument!r} was given; a pointer is an array, or np.uintp(0) for none"
    if element_of(argument.dtype) != parameter.element:
        return f"a number of type {argument.dtype} was given"
    return None
