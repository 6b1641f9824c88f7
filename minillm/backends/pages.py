"""The memory of a K/V cache: the layout of its pages. Which sequence owns which page is decided in `cache/`."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import FLOAT32, Format
from .states import States
from .stored_vectors import StoredVectors, reserve, trim

Shape = tuple[int, int, int, int, int]
"""[L, pages, K, P, D]"""


class Pages:
    """One model's keys and values, [L, pages, K, P, D] each, in the format of the backend that made them."""

    keys: Any
    values: Any
    places: Mapping[int, int] | None = None
    """Number of each layer that is held -> its place in the arrays; None: the layers are numbered by their places.
    All layers may take turns in the memory of one where a pass computes whole texts: each layer then reads only what
    it has just written"""
    others: "tuple[Pages, ...]" = ()
    """In the first group of `ModelConfig.kv_groups`, the memory of the others. This one's own is not among them: in a
    circle of references a cache would keep its memory until Python's collector finds it"""
    alike: "tuple[Pages, ...]" = ()
    """The others that have the same page numbers: a page is copied, read and written in all of them"""
    value_dim = 0
    """Values are the last numbers of the keys, so many (latent attention); 0: values of their own"""
    states: States | None = None
    """The states of sequences, of layers without keys and values"""
    threads_may_read = True
    """Whether other threads may call `read` while a pass runs"""

    def __init__(self, xp: Any, shape: Shape, form: Format = FLOAT32, value_dim: int = 0) -> None:
        """Reserve the memory; on a CPU the system provides it as pages are first used."""
        assert not (value_dim and form.group), "values in rotated keys are no vectors of their own"
        empty = reserve if xp is np else xp.empty

        def vectors() -> Any:
            return empty(shape, xp.float32) if form == FLOAT32 else StoredVectors.empty(shape, form)

        self.keys = vectors()
        self.values = self._values_in_keys(value_dim) if value_dim else vectors()

    def _values_in_keys(self, value_dim: int) -> Any:
        """The values as a view of the keys. [L, pages, K, P, value_dim]"""
        self.value_dim = value_dim
        if isinstance(self.keys, StoredVectors):
            return StoredVectors(self.keys.data[..., -value_dim:], self.keys.scales)
        return self.keys[..., -value_dim:]

    @property
    def groups(self) -> "tuple[Pages, ...]":
        """In the first group of `ModelConfig.kv_groups`, the memory of each, this one's first; empty if it is alone."""
        return (self, *self.others) if self.others else ()

    @property
    def heads(self) -> int:
        """K"""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        values = 0 if self.value_dim else self.values.nbytes
        return int(self.keys.nbytes + values) + (0 if self.states is None else self.states.nbytes)

    @cached_property
    def layers(self) -> Mapping[int, tuple[Any, Any]]:
        """Each layer's keys and values by its number, as kernels and the reference take them. 2 x [pages, K, P, D]"""
        places = {i: i for i in range(self.keys.shape[0])} if self.places is None else self.places
        if isinstance(self.keys, StoredVectors):
            return {layer: (self.keys.layer(at), self.values.layer(at)) for layer, at in places.items()}
        return {layer: (self.keys[at], self.values[at]) for layer, at in places.items()}

    def states_of(self, layer: int) -> tuple[Any, ...]:
        """The states of one layer without keys and values, for operations. [slots, ...] each"""
        assert self.states is not None
        return self.states.layer(layer)

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays as they are stored, [L, pages, K, P, ...] each, by name; int8 and int4 have scales besides.

        Values that are in the keys are not listed. Arrays of other groups with the same pages have the group's number
        in their names: "keys.1".
        """
        arrays: dict[str, Any] = {}
        for i, pages in enumerate(self.alike, 1):
            arrays |= {f"{name}.{i}": array for name, array in pages.arrays.items()}
        for name, stored in (("keys", self.keys), *(() if self.value_dim else (("values", self.values),))):
            if isinstance(stored, StoredVectors):
                arrays |= {name: stored.data} | ({} if stored.scales is None else {f"{name}.scales": stored.scales})
            else:
                arrays[name] = stored
        return arrays

    def copy(self, source: int, target: int, positions: slice) -> None:
        """Copy some positions of a page to the same places of another, in all layers."""
        for array in self.arrays.values():
            array[:, target, :, positions] = array[:, source, :, positions]

    def trim(self, pages: Sequence[int]) -> bool:
        """Give the memory of pages that nobody uses back to the system; their numbers are lost. False: it keeps it."""
        trimmed = [trim(array, pages) for array in self.arrays.values()]
        return all(trimmed)

    def read(self, pages: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Copies of some pages in host memory, as they are stored. [L, n, K, P, ...] each"""
        return {name: array[:, list(pages)] for name, array in self.arrays.items()}

    def write(self, pages: Sequence[int], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Overwrite some pages by what `read` has returned."""
        for name, array in self.arrays.items():
            array[:, list(pages)] = arrays[name]
