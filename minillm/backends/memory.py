"""The memory of a backend: results, the K/V cache, batches, and the recording of forward passes."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..batch import Batch
from ..reference.sampling import Draw
from .clock import Clock, HostClock
from .formats import ACTIVATION_FORMATS, CACHE_FORMATS, Format, chosen
from .memory_use import MemoryUse, free_memory
from .pages import Pages, Shape
from .recording import DecodeStep, Result, TokensRead
from .states import States, StateShapes
from .stored_vectors import reserve

_Place = tuple[int, bool]
"""Number of the call since `turn`, and whether its usual buffer holds the last layer's result, so that a second one is
used; numbers below -1 are those of `for_pass`."""
_NOWHERE: _Place = (-1, False)


class Arena:
    """Memory for results, handed out in call order and reused in every step; float32 unless said otherwise.

    A forward pass asks for the same arrays in the same order each time. The arena keeps them, so a decode step
    allocates nothing and addresses repeat from step to step. Each layer reuses the memory of the one before: only a
    layer's last result, which the next one reads, stays valid. So a long prompt needs the memory of one layer rather
    than of all.
    """

    def __init__(self, xp: Any, dtype: Any = np.float32, empty: Callable[[tuple[int, ...], Any], Any] | None = None):
        """Set the array module, the default dtype, and the allocator, which is `xp.empty` unless given."""
        self.dtype = np.dtype(dtype)
        self._empty = empty or xp.empty
        self._buffers: dict[_Place, Any] = {}  # flat, of bytes
        self._views: dict[_Place, Any] = {}  # the array last returned for each
        self.restart()

    def restart(self) -> None:
        """Begin a step: free all arrays. The order of buffers does not depend on what ran before."""
        self._next = self._next_of_pass = 0
        self._last = self._kept = _NOWHERE
        self._is_of_pass = False

    def turn(self) -> None:
        """Begin the next layer: free all arrays except the one taken last."""
        self._next = 0
        self._kept = self._last

    def give_back(self) -> None:
        """Free the array taken last: the next one may have its memory."""
        self._next -= 1

    @contextlib.contextmanager
    def for_pass(self) -> Iterator[None]:
        """Arrays taken inside the `with` block are valid until the next step, whatever layers begin."""
        self._is_of_pass = True
        try:
            yield
        finally:
            self._is_of_pass = False

    def another(self) -> "Arena":
        """An empty arena of the same kind."""
        return Arena(None, self.dtype, self._empty)

    def take(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """An uninitialised array, valid until the next `turn`; the last one of a layer until the turn after that."""
        if self._is_of_pass:
            self._next_of_pass += 1
            place = -1 - self._next_of_pass, False
        else:
            place = self._next, self._kept == (self._next, False)
            self._next += 1
            self._last = place
        view = self._views.get(place)
        if view is not None and view.shape == shape and view.dtype == (dtype or self.dtype):
            return view
        return self._make(place, shape, np.dtype(dtype or self.dtype))

    def _make(self, place: _Place, shape: tuple[int, ...], dtype: Any) -> Any:
        size = math.prod(shape) * dtype.itemsize
        if place not in self._buffers or self._buffers[place].size < size:
            self._buffers[place] = self._empty((size,), np.uint8)
        self._views[place] = self._buffers[place][:size].view(dtype).reshape(shape)
        return self._views[place]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class Memory:
    """The memory that a backend computes in, on the host unless a subclass has a device."""

    page_size = 128
    """P, positions in a page: large on a CPU, where attention reads long pieces of memory faster than short ones."""
    max_batched_tokens = 128
    """Tokens of a step in which sequences decode, unless the engine's user says otherwise"""
    max_prompt_tokens = 512
    """Prompt tokens of a forward pass in which no sequence decodes, at least; on a CPU more are hardly faster"""
    cache_share = 8
    """The K/V cache takes by default at most one byte in so many of the free memory, but may hold one full context"""
    committed_late = True
    """Whether the memory of a cache is provided as its pages are first used, so that unused ones take none"""
    records_adapters = False
    """Whether also passes with LoRA adapters of single requests are recorded"""
    adapter_numbers: dict[str, int] | None = None
    """Name of each adapter that rows have had so far -> its number, by which operations of a recorded pass read it on
    the device"""
    stage_tokens = 0
    """Tokens of the largest pass that `run` may record of a pipeline stage; what the stage receives is then always at
    the same address"""
    runs_ahead = False
    """Whether `launch` may launch a step while the one before it runs"""
    clock: Clock = HostClock()
    """Used by `observe.py` to time operations; a device that runs asynchronously has another."""

    def __init__(self, xp: Any = np, *, activations: str | Format = "float32", cache: str | Format = "float32") -> None:
        """Set the array module, and the formats of activations and of the K/V cache or their names."""
        self.xp = xp
        self.activations = chosen(ACTIVATION_FORMATS, activations)
        self.cache = chosen(CACHE_FORMATS, cache)
        self.arena = Arena(xp, self.activations.dtype)

    def position_bytes(self, K: int, D: int, value_dim: int = 0) -> int:
        """Bytes that one position's keys and values take in one layer of the cache; `value_dim` as of `Pages`."""
        return (1 if value_dim else 2) * K * self.cache.row_bytes(D)

    def new_pages(self, shape: Shape, value_dim: int = 0) -> Pages:
        """Memory for a K/V cache [L, pages, K, P, D]; `value_dim` as of `Pages`."""
        return Pages(self.xp, shape, self.cache, value_dim)

    def new_states(self, layers: Mapping[int, StateShapes], slots: int) -> States:
        """Memory for the states of some layers, by their numbers."""
        return States(self.xp, layers, slots, reserve if self.xp is np else self.xp.empty)

    def free_bytes(self) -> int:
        """Bytes that could still be reserved."""
        return free_memory()

    def trim(self) -> None:
        """Free the memory of results, between two passes: the next ones allocate it anew. On a device it is kept."""
        if self.committed_late:
            self.arena = Arena(self.xp, self.activations.dtype)

    def use(self) -> MemoryUse | None:
        """Memory in use on a device; None where it is the host's."""
        return None

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Operations inside the `with` block compute weights, outside of any pass: in an arena of their own."""
        arena, self.arena = self.arena, self._results().another()
        try:
            yield
        finally:
            self.arena = arena

    def _results(self) -> Arena:
        """The arena of results."""
        return self.arena

    def upload(self, batch: Batch, rows: Any) -> tuple[Batch, Any]:
        """Begin a forward pass. Returns the batch and the rows [R] whose logits are wanted, as operations take them."""
        self.arena.restart()
        return batch, np.asarray(rows, np.int64)

    def run(
        self,
        owner: object,
        batch: Batch,
        rows: Any,
        compute: Callable[[Batch, Any], Result],
        draws: Sequence[Draw | None] = (),
    ) -> Result:
        """Run one forward pass: call `compute` with the batch and rows as operations take them.

        A backend may record what `compute` launches and replay it on the next call with the same owner (a model with
        its cache), if it computes by recorded operations only (`recording.py`). So `compute` must depend on its
        arguments alone; where a record cannot be made it is called twice. Its result is a tuple of arrays with one row
        for each of `rows`, the logits first.

        `draws`, one for each of `rows` or none at all, are the calls of `TokenSampler.sample` that will follow, where
        they are known. They change no result; a backend may sample within the pass, so that the host waits once.
        """
        return compute(*self.upload(batch, rows))

    def launch(self, owner: object, step: DecodeStep) -> TokensRead | None:
        """Launch a decode step that `run` has recorded for this owner, without waiting for it.

        At most two steps may be under way: before the next launch the host must have read the tokens of the first.

        Returns:
            A function that reads its tokens. None, and nothing was launched, if the step is not recorded, or if it
            refers to tokens of a pass that was not the last.
        """
        return None
