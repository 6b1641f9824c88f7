"""Recording of forward passes: only what operations of kernels compute may be repeated.

A recorded pass is a program of launches. Whatever else computed in it would be left out of the replay: an operation
without a kernel, an operation that a subclass overrides, NumPy inside a layer. So a pass is recorded under seal: layers
get results and the batch's arrays as `Sealed`, which have a shape and views, and numbers for `recorded` operations
alone. Where anything else asks for the numbers, or another operation is called, the attempt ends: the pass is computed
once more in the ordinary way, and never replayed.

What only Python sees, such as a counter in a layer, cannot be noticed.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from inspect import isfunction
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch, IntArray

Result = TypeVar("Result", bound=tuple[Any, ...])
Operation = TypeVar("Operation", bound=Callable[..., Any])

_FORM = frozenset(("shape", "ndim", "dtype", "size", "itemsize", "nbytes", "strides", "flags"))
"""Attributes of a sealed array that may be read"""
_INDICES = int, slice, type(None), type(...)
"""An index of these is a view"""
_SAME = "num_tokens", "adapters"
"""Attributes of a batch that all passes of one record share"""


class _State(threading.local):
    sealing = touched = False
    """Whether this thread records a pass, outside of its operations; whether something touched the pass"""


_state = _State()


class Touched(BaseException):
    """Ends an attempt to record: no `Exception`, so that nobody takes it for an error of their own."""


def touch() -> None:
    """Say that something runs, outside of recorded operations, which a replay would leave out.

    Raises:
        Touched: this thread records a pass.
    """
    if _state.sealing:
        _state.touched = True
        raise Touched


def recorded(operation: Operation) -> Operation:
    """Declare that an operation computes by launches alone, or itself says where it does not."""

    @wraps(operation)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _state.sealing:
            return operation(self, *args, **kwargs)
        args = tuple(_opened(value) for value in args)
        kwargs = {name: _opened(value) for name, value in kwargs.items()}
        _state.sealing = False
        try:
            result = operation(self, *args, **kwargs)
        finally:
            _state.sealing = True
        return sealed(result)

    return composed(call)  # type: ignore[return-value]


def composed(operation: Operation) -> Operation:
    """Declare that an operation computes nothing itself: it calls others of the backend."""
    operation.repeats = True  # type: ignore[attr-defined]
    return operation


class Recordable:
    """A backend whose passes may be recorded: operations that are not declared `recorded` or `composed` end it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in dir(cls):
            operation = getattr(cls, name)
            if not name.startswith("_") and isfunction(operation) and not hasattr(operation, "repeats"):
                setattr(cls, name, _unrecorded(operation))


def _unrecorded(operation: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        touch()
        return operation(*args, **kwargs)

    return composed(call)


def attempt(compute: Callable[[Any, Any], Result], batch: Batch, rows: Any) -> Result | None:
    """The result of a pass under seal; None if something touched it, so that it has to be computed unsealed."""
    _state.sealing, _state.touched = True, False
    try:
        result: Result = _opened(compute(SealedBatch(batch), rows))
    except Touched:
        return None
    except (TypeError, AttributeError):  # also of libraries to which a sealed array is none
        return None
    finally:
        _state.sealing = False
    return None if _state.touched else result


def sealed(value: Any) -> Any:
    """Arrays as layers get them while a pass is recorded: alone, or in a tuple; other values as they are."""
    if isinstance(value, tuple):
        return _each(sealed, value)
    return Sealed(value) if _state.sealing and _is_array(value) else value


def _opened(value: Any) -> Any:
    """The array of a sealed one, alone or in a tuple; an array that is not sealed came from elsewhere."""
    if isinstance(value, Sealed | SealedBatch):
        return value.inside
    if isinstance(value, tuple):
        return _each(_opened, value)
    if _is_array(value):
        touch()
    return value


def _each(change: Callable[[Any], Any], values: tuple[Any, ...]) -> tuple[Any, ...]:
    changed = map(change, values)
    return type(values)(*changed) if hasattr(values, "_fields") else tuple(changed)


def _is_array(value: Any) -> bool:
    return bool(getattr(value, "strides", ()))  # not of scalars


def _address(array: Any) -> int:
    if isinstance(array, np.ndarray):  # whose `data` is no buffer in bfloat16
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)  # CuPy's


class Sealed(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a pass that is recorded; when the attempt has ended it gives its numbers to everybody."""

    __slots__ = ("inside",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        if name not in _FORM:
            touch()
        return getattr(self.inside, name)

    def __len__(self) -> int:
        return len(self.inside)

    def __getitem__(self, index: Any) -> Any:
        if not all(isinstance(item, _INDICES) for item in (index if isinstance(index, tuple) else (index,))):
            touch()  # not a view
        selected = self.inside[index]
        if not _is_array(selected):
            touch()  # a number
        return sealed(selected)

    def reshape(self, *shape: Any) -> Any:
        """A view of another shape; where numbers would have to be copied, the attempt to record ends."""
        reshaped = self.inside.reshape(*shape)
        if _address(reshaped) != _address(self.inside):
            touch()
        return sealed(reshaped)

    def __setitem__(self, index: Any, numbers: Any) -> None:
        touch()
        self.inside[index] = numbers

    def __iter__(self) -> Any:
        touch()
        return iter(self.inside)

    def __bool__(self) -> bool:
        touch()
        return bool(self.inside)

    def __repr__(self) -> str:
        touch()
        return repr(self.inside)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        touch()
        opened = [value.inside if isinstance(value, Sealed) else value for value in inputs]
        return getattr(function, method)(*opened, **options)


class SealedBatch:
    """A batch of a pass that is recorded: its arrays are sealed; what else differs from pass to pass is not told."""

    __slots__ = ("inside",)

    def __init__(self, batch: Batch) -> None:
        self.inside = batch

    def in_group(self, group: int) -> "SealedBatch":
        """As of `Batch`."""
        return SealedBatch(self.inside.in_group(group))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inside, name)
        if name not in _SAME and not (value is None or _is_array(value)):
            touch()
        return sealed(value)


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """A step of N sequences with one new token each; the host need not know the tokens."""

    token_ids: IntArray
    """[N]; -1 - r stands for the token chosen from row r of the pass before, which is read on the device"""
    positions: IntArray
    """[N], positions of these tokens"""
    pages: IntArray
    """[N, B]: each sequence's pages, in order; what follows them is not read"""
    draws: NDArray[Any]
    """[N] of type `DRAWS`: how each row's token is chosen"""
    adapters: tuple[str | None, ...] = ()
    """[N], each sequence's LoRA adapter; empty if none has one"""
    tables: Mapping[int, IntArray] = field(default_factory=dict)
    """By its number, the pages of each other group of layers that has others, [N, B]"""


TokensRead = Callable[[], IntArray | None]
"""Waits for a step's tokens, [N]; None: some row's logits are no distribution, and nothing can be chosen from them"""
