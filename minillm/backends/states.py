"""The memory of states, which layers without keys and values keep of a sequence: arrays of a fixed size.

A state is in a slot, the same in all layers. Which sequence uses which slot is decided in `cache/states.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .recording import touch
from .stored_vectors import reserve, trim

SLOTS_PER_SEQUENCE = 4
"""Slots that a sequence has at most, in a pass: two that it may go on from, and two that the pass writes"""

StateShapes = tuple[tuple[int, ...], ...]
"""Shapes of the arrays that one layer keeps of a sequence; none of a layer with keys and values"""


def state_bytes(layers: Sequence[StateShapes]) -> int:
    """Bytes of one state in all layers, in float32."""
    return 4 * sum(int(np.prod(shape)) for shapes in layers for shape in shapes)


class States:
    """The states of one model, float32 on an array module."""

    def __init__(
        self,
        xp: Any,
        layers: Mapping[int, StateShapes],
        slots: int,
        empty: Callable[[tuple[int, ...], Any], Any] = reserve,
    ) -> None:
        """Reserve the memory of so many slots by `empty`; on a CPU the system provides it as they are first used."""
        self._xp = xp
        self._layers = {
            layer: tuple(empty((slots, *shape), np.float32) for shape in shapes) for layer, shapes in layers.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return int(sum(array.nbytes for arrays in self._layers.values() for array in arrays))

    def layer(self, layer: int) -> tuple[Any, ...]:
        """One layer's arrays, for operations. [slots, ...] each"""
        touch()
        return self._layers[layer]

    @property
    def arrays(self) -> dict[str, Any]:
        """All arrays by name, [slots, ...] each."""
        return {f"states.{i}.{j}": array for i, arrays in self._layers.items() for j, array in enumerate(arrays)}

    def trim(self, slots: Sequence[int]) -> None:
        """Give the memory of slots that hold no state back to the system, as far as it can."""
        for array in self.arrays.values():
            trim(array[None], slots)

    def read(self, slot: int) -> dict[str, NDArray[Any]]:
        """Copies of one state in host memory."""
        copied = {name: array[slot] for name, array in self.arrays.items()}
        return {name: array.get() if hasattr(array, "get") else array.copy() for name, array in copied.items()}

    def write(self, slot: int, state: Mapping[str, NDArray[Any]]) -> None:
        """Overwrite a slot by what `read` has returned."""
        for name, array in self.arrays.items():
            array[slot] = self._xp.asarray(state[name])
