"""Arguments in guarded memory: beyond each array lies a page that nobody may touch.

A launch gets copies, each with its end at the end of a page. To read or write one byte more is a fault, which the
runtime turns into an error that names the kernel's line. What lies before an array and between the rows of a view, and
every const array, must come back as it was. Arrays that overlap (Q, K and V in one buffer) stay together.
"""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.lib.stride_tricks import as_strided

from .arguments import Parameter, is_array

Array = np.ndarray[Any, Any]

PAGE = mmap.PAGESIZE
FORBIDDEN = 0  # PROT_NONE
UNUSED = 0xFF
libc = ctypes.CDLL(None, use_errno=True)


class Extent:
    """Memory that one argument lies in, or several that overlap."""

    def __init__(self, start: int, end: int, arrays: list[tuple[int, Array, bool]]) -> None:
        """Copy the bytes from `start` to `end`; `arrays` are (position, array, may be written)."""
        self.start, self.size, self.arrays = start, end - start, arrays
        pages = -(-(self.size + 15) // PAGE)
        self._memory = mmap.mmap(-1, (pages + 2) * PAGE)  # a guard, the copy, a guard
        self.bytes = np.frombuffer(self._memory, np.uint8)
        first = _address(self.bytes)
        self._inside = slice(PAGE, PAGE * (pages + 1))
        self.bytes[self._inside] = UNUSED
        # As close to the guard as the original's alignment allows: kernels choose the width of their loads by it.
        self.copy = first + self._inside.stop - self.size
        self.copy -= (self.copy - start) % 16
        ctypes.memmove(self.copy, start, self.size)
        for guard in (first, first + self._inside.stop):
            if libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), FORBIDDEN):
                raise OSError(ctypes.get_errno(), "mprotect")

    @property
    def names(self) -> str:
        """The arguments, for messages."""
        return "argument " + ", ".join(str(position) for position, _, _ in self.arrays)

    @property
    def is_written(self) -> bool:
        """Whether an argument in it may be written."""
        return any(may_be_written for _, _, may_be_written in self.arrays)

    def distance(self, address: int) -> int:
        """How far an address is from the copy; 0 inside."""
        return max(self.copy - address, address - (self.copy + self.size - 1), 0)

    def misuse(self) -> str | None:
        """A sentence about a write that is not allowed; None without one."""
        offset = self.copy - _address(self.bytes)
        around = np.r_[self.bytes[self._inside.start : offset], self.bytes[offset + self.size : self._inside.stop]]
        if (around != UNUSED).any():
            return f"the kernel writes just outside {self.names}"
        changed = self.bytes[offset : offset + self.size] != self._original()
        for _, array, may_be_written in self.arrays:
            if may_be_written:
                self._part(changed, array)[...] = False
        return f"the kernel writes to {self.names} where it may not" if changed.any() else None

    def restore(self) -> None:
        """Write the copy back to where it came from."""
        if self.is_written:
            ctypes.memmove(self.start, self.copy, self.size)

    def _original(self) -> Array:
        memory = memoryview((ctypes.c_ubyte * self.size).from_address(self.start)).cast("B")
        return np.frombuffer(memory, np.uint8)

    def _part(self, flags: Array, array: Array) -> Array:
        """The flags, one for each byte, that belong to `array`."""
        shape, strides = (*array.shape, array.itemsize), (*array.strides, 1)
        return as_strided(flags[_address(array) - self.start :], shape, strides)


class Guarded:
    """The arrays of one launch, in guarded memory."""

    def __init__(self, parameters: Sequence[Parameter], arguments: Sequence[Any]) -> None:
        """Copy every array among `arguments`."""
        arrays = [
            (position, argument, not parameter.is_const)
            for position, (parameter, argument) in enumerate(zip(parameters, arguments, strict=True))
            if is_array(argument)
        ]
        groups: list[tuple[int, int, list[tuple[int, Array, bool]]]] = []
        for start, end, array in sorted(((*_bounds(a[1]), a) for a in arrays), key=lambda group: group[:2]):
            if groups and start < groups[-1][1]:
                low, high, members = groups.pop()
                groups.append((low, max(high, end), [*members, array]))
            else:
                groups.append((start, end, [array]))
        self.extents = [Extent(*group) for group in groups]

    def address(self, array: Array) -> int:
        """Address of the copy of an array's first element."""
        for extent in self.extents:
            if any(member is array for _, member, _ in extent.arrays):
                return extent.copy + _address(array) - extent.start
        raise KeyError("not an argument of this launch")

    def place(self, address: int) -> int:
        """The address in the copies of the byte at one of the caller's; itself where it is no argument's."""
        inside = (extent for extent in self.extents if extent.start <= address < extent.start + extent.size)
        return next((extent.copy + address - extent.start for extent in inside), address)

    def finish(self) -> str | None:
        """Write results back; return a sentence about a write that is not allowed."""
        sentences = [misuse for extent in self.extents if (misuse := extent.misuse())]
        for extent in self.extents:
            extent.restore()
        return sentences[0] if sentences else None

    def explain(self, address: int) -> str:
        """Name the argument at or near an address."""
        nearest = min(self.extents, key=lambda extent: extent.distance(address), default=None)
        if nearest is None or nearest.distance(address) > PAGE:
            return f"0x{address:x}, far from any argument"
        if nearest.distance(address) == 0:
            return f"byte {address - nearest.copy} of {nearest.names}"
        side = "before" if address < nearest.copy else "beyond the end of"
        return f"memory {side} {nearest.names} ({nearest.distance(address)} bytes away)"


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _bounds(array: Array) -> tuple[int, int]:
    return byte_bounds(array) if array.size else (_address(array), _address(array))
