"""Decode steps, each padded to a bucket and recorded as a CUDA graph, with the workspace they use.

A graph repeats launches with the same addresses. So each bucket has its own workspace, reserved when its step first
runs, from which everything that changes between steps is read. The first run launches call by call, and compiles the
kernels; the second is recorded; later ones replay it.
"""

from collections.abc import Callable
from typing import Any, Generic
from weakref import WeakKeyDictionary

from ..arena import Arena
from ..base import Result
from . import attention
from .batches import BatchBuffers, Bucket
from .choosing import Choice
from .memory import WORKSPACE, Device


class StepWorkspace:
    """Device memory of steps of one kind: the batch, results, and scratch memory of attention and token choice."""

    def __init__(self, device: Device, dtype: Any) -> None:
        self._device = device
        self.batch = BatchBuffers(device)
        self.arena = Arena(device.xp, dtype, self._empty)
        self.choice = Choice(device)
        self._partials = self._empty((0,), "float32")
        self._arrived = self._empty((0,), "int32")

    def attention(self, N: int, H: int, D: int, positions: int) -> attention.Workspace:
        """Scratch memory of the decode kernel."""
        size = attention.partials_size(N, H, D, positions)
        if self._partials.size < size:
            self._partials = self._empty((size,), "float32")
        if self._arrived.size < N * H:
            self._arrived = self._empty((N * H,), "int32")
            self._arrived[...] = 0
        return attention.Workspace(self._partials, self._arrived)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        parts = (self.batch, self.arena, self.choice, self._partials, self._arrived)
        return int(sum(part.nbytes for part in parts))

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._device.empty(shape, dtype, WORKSPACE)


class DecodeStep(Generic[Result]):
    """One bucket's step for one owner."""

    def __init__(self, device: Device, dtype: Any) -> None:
        self.workspace = StepWorkspace(device, dtype)
        self.plain = False
        """Whether some operation has no kernel, so that the step is not recorded; set while it runs."""
        self._device = device
        self._replay: Callable[[], object] | None = None
        self._result: Result | None = None

    def run(self, launch: Callable[[], Result]) -> Result:
        """Run `launch`, or replay it. Returns its result, padded."""
        if self._replay is None and self._result is not None and not self.plain:
            self._replay = self._device.record(launch)
        if self._replay is None:
            self._result = launch()
        else:
            self._replay()
            self.workspace.choice.repeated()
        assert self._result is not None
        return self._result


class Steps:
    """The steps of all owners, one per bucket; dropped with their owner."""

    def __init__(self, device: Device, dtype: Any) -> None:
        self._device, self._dtype = device, dtype
        self._steps: WeakKeyDictionary[object, dict[Bucket, DecodeStep[Any]]] = WeakKeyDictionary()

    def of(self, owner: object, bucket: Bucket) -> DecodeStep[Any]:
        """An owner's step for a bucket, created when first asked for."""
        steps = self._steps.setdefault(owner, {})
        if bucket not in steps:
            steps[bucket] = DecodeStep(self._device, self._dtype)
        return steps[bucket]

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(step.workspace.nbytes for steps in self._steps.values() for step in steps.values())


def cut(result: Result, rows: int, padded: int) -> Result:
    """The first rows of each array of a padded result."""
    if rows == padded:
        return result
    shorter: Result = type(result)(*(array[:rows] for array in result))
    return shorter
