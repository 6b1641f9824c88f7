"""An array module whose arrays never meet the host's by accident, as CuPy's do not: NumPy's, behind a wall.

`xp.asarray` takes an array over, and `fetch` brings one back. A function, an operator, an index or an assignment that
is given an array of the host together with one of the device raises TypeError, as does the host when it is to take one
of the device for its own.
"""

from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class OnDevice(NDArrayOperatorsMixin):
    """An array of the device."""

    def __init__(self, inside: np.ndarray) -> None:
        self.inside = inside

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an array of the device taken for one of the host")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return _wrapped(getattr(ufunc, method)(*map(_inside, inputs), **_insides(options)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # __array_interface__ and its like would let NumPy in
            raise AttributeError(name)
        found = getattr(self.inside, name)
        return _guarded(found) if callable(found) else _wrapped(found)

    def __len__(self) -> int:
        return len(self.inside)

    def __getitem__(self, index: Any) -> Any:
        return _wrapped(self.inside[_inside(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.inside[_inside(index)] = _inside(value)


class Module:
    """What stands in for `cupy`."""

    ndarray = OnDevice

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        return _guarded(found) if callable(found) and not isinstance(found, type) else found

    def asarray(self, values: Any, dtype: Any = None) -> Any:
        """A copy on the device, if it is not there."""
        return values if isinstance(values, OnDevice) else OnDevice(np.array(values, dtype))


def fetch(array: OnDevice) -> np.ndarray:
    """A copy on the host."""
    return array.inside.copy()


def _guarded(function: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        return _wrapped(function(*map(_inside, arguments), **_insides(options)))

    return call


def _inside(value: Any) -> Any:
    """What NumPy is to work on."""
    if isinstance(value, np.ndarray):
        raise TypeError("an array of the host given to the device")
    if isinstance(value, tuple):
        return tuple(map(_inside, value))
    return value.inside if isinstance(value, OnDevice) else value


def _insides(options: dict[str, Any]) -> dict[str, Any]:
    return {name: _inside(value) for name, value in options.items()}


def _wrapped(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, np.ndarray) else value
