"""The token of each row chosen on the device; only ids, and whether the row is fit to choose from, come back."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import NumericalError
from ...ops.philox import Keys
from .kernels import Kernels
from .memory import WORKSPACE, Device, Parcel
from .sampling import Draws, Workspace, argmax, sample


class Choice:
    """One token for each row of some logits."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._workspace: Workspace | None = None
        self._chosen: Any = None  # ids and flags on the device, [2, rows] int32
        self._pinned: NDArray[np.int32] | None = None
        self._fetched: NDArray[np.int32] | None = None
        self._V = 0
        self.logits: Any = None
        """What was chosen from, [R, V]"""

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        if self._workspace is None:
            return 0
        return int(sum(array.nbytes for array in (*vars(self._workspace).values(), self._chosen)))

    def take_likeliest(self, kernels: Kernels, logits: Any) -> None:
        """Launch the choice of each row's likeliest token."""
        ids, flags = self._room(logits)
        argmax(kernels, logits, self._workspace_of_room, ids, flags)

    def draw(self, kernels: Kernels, logits: Any, draws: Draws) -> None:
        """Launch a draw for each row."""
        ids, flags = self._room(logits)
        sample(kernels, logits, draws, self._workspace_of_room, ids, flags)

    def launched(self) -> None:
        """Tell that what was launched last runs once more, on the same logits: a recorded step is replayed."""
        self._fetched = None

    def rows_of(self, logits: Any) -> slice | None:
        """Which of the rows these logits are, where they are a part of the same memory; else None."""
        if self.logits is None or logits.shape[1] != self.logits.shape[1]:
            return None
        distance = self._device.address(logits) - self._device.address(self.logits)
        first = distance // (4 * logits.shape[1])
        inside = distance >= 0 and first + len(logits) <= len(self.logits)
        return slice(first, first + len(logits)) if inside else None

    def fetch(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Token ids [R], and of each row whether it is unfit to choose from [R]. The host waits, once."""
        if self._fetched is None:
            assert self._pinned is not None
            self._device.fetch(self._chosen, self._pinned)
            self._device.wait()
            self._fetched = self._pinned.copy()
        ids, flags = self._fetched[:, : len(self.logits)]
        return ids, flags

    def _room(self, logits: Any) -> tuple[Any, Any]:
        R, V = logits.shape
        if self._chosen is None or self._chosen.shape[1] < R or self._V != V:
            self._workspace = Workspace.allocate(_Empty(self._device), R, V)
            self._chosen = self._device.empty((2, R), np.int32, WORKSPACE)
            self._pinned = self._device.pinned((2, R), np.int32)
            self._V = V
        self.logits, self._fetched = logits, None
        return self._chosen[0, :R], self._chosen[1, :R]

    @property
    def _workspace_of_room(self) -> Workspace:
        assert self._workspace is not None
        return self._workspace


class Sampler:
    """Draws rows that have settings in common."""

    def __init__(self, device: Device) -> None:
        self._settings = Parcel(device)
        self._choice = Choice(device)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self._settings.nbytes + self._choice.nbytes

    def sample(
        self, kernels: Kernels, logits: Any, keys: Keys, *, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> NDArray[np.int32]:
        """One draw for each row. [R, V] -> [R]

        Raises:
            NumericalError: a row holds NaN or +inf, or nothing but -inf.
        """
        R = len(logits)
        self._settings.lay_out(
            top_ps=((R,), np.float64),
            seeds=((R,), np.uint64),
            temperatures=((R,), np.float32),
            top_ks=((R,), np.int32),
            min_ps=((R,), np.float32),
            sequences=((R,), np.int32),
            positions=((R,), np.int32),
        )
        host = self._settings.host
        host["temperatures"][:], host["top_ks"][:], host["top_ps"][:], host["min_ps"][:] = (
            temperature,
            top_k,
            top_p,
            min_p,
        )
        host["seeds"][:], host["sequences"][:], host["positions"][:] = keys.seeds, keys.sequences, keys.positions
        self._settings.send()
        self._choice.draw(kernels, logits, Draws(**self._settings.there))
        ids, flags = self._choice.fetch()
        if flags.any():
            raise NumericalError(f"row {int(flags.argmax())} of the logits cannot be sampled from: it is not finite")
        return ids


class _Empty:
    """A device's memory under the names that array modules use."""

    uint32, uint64 = np.uint32, np.uint64

    def __init__(self, device: Device) -> None:
        self._device = device

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._device.empty(shape, dtype, WORKSPACE)
