"""Chooses each row's token on the device; only ids and a validity flag per row are copied back.

After a pass, argmax and the draws known in advance are launched. The first query about its logits, whether they are
finite, waits for all of them; later queries are answered on the host.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...batch import IntArray
from ...errors import NumericalError
from ...reference.philox import Keys
from ...reference.sampling import DRAWS, Draw
from ..recording import Sealed, TokensRead
from ..token_sampler import LogProbs, TokenSampler
from .device import WORKSPACE, Device, StagingBuffer
from .kernels import Kernels, type_name
from .sampling import Draws, Workspace, argmax, sample

Answer = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Token ids [R], and flags [R] of the rows that cannot be chosen from."""

_INFINITE = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""By type, the bits of the exponent, all of which are set in NaN and in infinity alone"""

_LIKELIEST = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, sequence=0, position=0)
"""For a row that is not sampled."""


class Choice:
    """Tokens chosen from some logits: the argmax of each row, and one draw."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._draws = StagingBuffer(device)
        self._workspace: Workspace | None = None
        self._chosen: Any = None  # on the device: ids and flags, then those of draws, [4, rows] int32
        self._pinned: NDArray[np.int32] | None = None
        self._ahead: list[NDArray[np.int32]] = []  # of the two steps that may be under way, the next one first
        self._fetched: NDArray[np.int32] | None = None
        self._logits: Any = None  # [R, V]
        self._drawn: list[Draw | None] = []  # of the first rows

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        if self._workspace is None:
            return 0
        arrays = (*vars(self._workspace).values(), self._chosen)
        return self._draws.nbytes + int(sum(array.nbytes for array in arrays))

    def look_at(self, logits: Any) -> Workspace:
        """Drop earlier results, and make room for those of these logits."""
        R, V = logits.shape
        if self._workspace is None or self._chosen.shape[1] < R or self._logits.shape[1] != V:
            workspace = Workspace.allocate(_Empty(self._device), R, V)
            chosen = self._device.empty((4, R), np.int32, WORKSPACE)
            self._workspace, self._chosen = workspace, chosen
            self._pinned, *self._ahead = (self._device.pinned((4, R), np.int32) for _ in range(3))
        self._logits, self._drawn, self._fetched = logits, [], None
        return self._workspace

    def take_likeliest(self, kernels: Kernels, logits: Any) -> None:
        """Launch the argmax of each row."""
        workspace, R = self.look_at(logits), len(logits)
        argmax(kernels, logits, workspace, self._chosen[0, :R], self._chosen[1, :R])

    def repeated(self) -> None:
        """Note that a replayed step has launched `take_likeliest` again, on the same logits."""
        self._drawn, self._fetched = [], None

    def draw(self, kernels: Kernels, draws: Sequence[Draw | None]) -> None:
        """Launch a draw from each of the first rows of the current logits."""
        self._launch_draws(kernels, np.array([draw or _LIKELIEST for draw in draws], DRAWS))
        self._drawn, self._fetched = list(draws), None

    def _launch_draws(self, kernels: Kernels, table: NDArray[Any]) -> None:
        assert self._workspace is not None
        R = len(table)
        self._draws.lay_out(**{f"{name}s": ((R,), table.dtype[name]) for name in Draw._fields})
        for name in Draw._fields:
            self._draws.host[f"{name}s"][:] = table[name]
        self._draws.send()
        there = Draws(**self._draws.there)
        sample(kernels, self._logits[:R], there, self._workspace, self._chosen[2, :R], self._chosen[3, :R])

    def send(self, kernels: Kernels, draws: NDArray[Any]) -> tuple[Any, TokensRead]:
        """Choose the tokens of a step that has just been replayed, and queue their copy to the host.

        Args:
            kernels: of any storage type
            draws: [N] of type `DRAWS`, of the first rows

        Returns:
            The tokens on the device, [N], and a function that reads them. Two copies may be under way at a time.
        """
        self.repeated()
        N, drawn = len(draws), bool(draws["temperature"].any())
        if drawn:
            self._launch_draws(kernels, draws)
        pinned = self._ahead.pop(0)
        self._ahead.append(pinned)
        self._device.fetch(self._chosen, pinned)
        wait = self._device.mark()

        def read() -> IntArray | None:
            wait()
            if pinned[1, :N].any() or (drawn and pinned[3, :N].any()):
                return None
            return pinned[2 if drawn else 0, :N].astype(np.int64)

        return self._chosen[2 if drawn else 0, :N], read

    def rows_of(self, logits: Any) -> slice | None:
        """The rows that these logits are, if they are part of the same memory; else None."""
        if self._logits is None or logits.shape[1] != self._logits.shape[1]:
            return None
        distance = self._device.address(logits) - self._device.address(self._logits)
        first = distance // (4 * logits.shape[1])
        inside = distance >= 0 and first + len(logits) <= len(self._logits)
        return slice(first, first + len(logits)) if inside else None

    def likeliest(self, rows: slice) -> Answer:
        """The argmax of some rows; a flag marks NaN and plus infinity."""
        ids, flags = self._fetch()[:2, rows]
        return ids, flags

    def drawn(self, rows: slice, draws: list[Draw | None]) -> Answer | None:
        """The tokens drawn from some rows; None if these draws were not made. A flag marks a row that has no choice."""
        if self._drawn[rows] != draws:
            return None
        ids, flags = self._fetch()[2:, rows]
        return ids, flags

    def _fetch(self) -> NDArray[np.int32]:
        """All ids and flags; the host waits once."""
        if self._fetched is None:
            assert self._pinned is not None
            self._device.fetch(self._chosen, self._pinned)
            self._device.wait()
            self._fetched = self._pinned.copy()
        return self._fetched


class CudaSampler(TokenSampler):
    """Chooses tokens from logits on the device; what the last pass has chosen in advance is already known."""

    def __init__(self, device: Device, kernels: Kernels) -> None:
        super().__init__(device.xp)
        self._host = TokenSampler()
        self._device, self._kernels = device, kernels
        self._last: Choice | None = None  # from the logits of the pass that ran last
        self._other = Choice(device)
        self.watched: Any = None
        """Hidden states of the last pass, [T, E], which `states_finite` looks at"""
        self._watched_rows: tuple[slice, ...] = (slice(None),)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device, except for the last pass's."""
        return self._other.nbytes

    def forget(self) -> None:
        """Drop the last pass's results: a new pass may overwrite its logits."""
        self._last, self.watched, self._watched_rows = None, None, (slice(None),)

    def watch(self, states: Any, rows: tuple[slice, ...] = (slice(None),)) -> None:
        """As `TokenSampler.watch`, without looking at them yet; padded states have some `rows` that count."""
        self.watched, self._watched_rows = states.inside if isinstance(states, Sealed) else states, rows

    def states_finite(self) -> bool:
        """Whether the hidden states that the last pass has watched are finite; the host waits, the device looks."""
        states, self.watched = self.watched, None
        if states is None:
            return True
        self._device.activate()
        self._device.wait()
        mask = _INFINITE[type_name(states.dtype)]
        bits = states.view(np.uint32 if states.dtype.itemsize == 4 else np.uint16)  # bfloat16 is none of NumPy's types
        return not any(bool(((bits[rows] & mask) == mask).any()) for rows in self._watched_rows)

    def follow(self, choice: Choice, draws: Sequence[Draw | None]) -> None:
        """After a pass and its argmax, launch the draws that are known in advance."""
        self._last = choice
        if any(draw is not None for draw in draws):
            choice.draw(self._kernels, draws)

    @property
    def host(self) -> TokenSampler:
        """The sampler on NumPy."""
        return self._host

    @property
    def on_host(self) -> bool:
        """False: the logits are in the device's memory."""
        return False

    def to_host(self, array: Any) -> Any:
        """A copy on the host, as float32."""
        return self._device.copy_of(array).astype(np.float32, copy=False)

    def finite(self, logits: Any) -> bool:
        """Whether no logit is NaN or plus infinity. The chosen tokens arrive in the same copy. [R, V]

        Hidden states, which a model without a head has in place of logits, may be in the storage type.
        """
        if logits.dtype != np.float32:
            return bool(self.xp.isfinite(logits).all())
        return not len(logits) or not self._likeliest(logits)[1].any()

    def argmax(self, logits: Any) -> Any:
        """The most likely token of each row, on the host; already known for the last pass's logits. [R, V] -> [R]"""
        return self._likeliest(logits)[0]

    def sample(self, logits: Any, keys: Keys, *, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
        """Sample one token per row, returned on the host; already known if in the `draws` of `run`. [R, V] -> [R]

        Raises:
            NumericalError: a row holds NaN or +inf, or nothing but -inf.
        """
        assert keys.purpose == 0, "the kernel draws tokens; other draws are made on the host"
        filters = (np.broadcast_to(each, len(logits)).tolist() for each in (temperature, top_k, top_p, min_p))
        columns = *filters, keys.seeds.tolist(), keys.sequences.tolist(), keys.positions.tolist()
        draws = [Draw(*row) if row[0] > 0 else None for row in zip(*columns, strict=True)]  # None: the most likely
        ids, flags = self._drawn(logits, draws)
        if flags.any():
            raise NumericalError(f"row {int(flags.argmax())} of the logits cannot be sampled from: it is not finite")
        return ids

    def log_probs(self, logits: Any, tokens: Any, top: int = 0) -> LogProbs:
        """As `TokenSampler.log_probs`, by the array module on the device; the results are on the host."""
        self._device.activate()
        xp, R = self.xp, len(logits)
        ids = xp.empty((R, 1 + top), xp.int64)
        ids[:, 0] = xp.asarray(tokens)
        if top:
            ids[:, 1:] = xp.argsort(-logits, axis=-1, kind="stable")[:, :top]  # [R, V] -> [R, top]
        best = logits.max(axis=-1, keepdims=True, initial=-xp.inf)
        sums = best + xp.log(xp.exp(logits - best).sum(axis=-1, keepdims=True, dtype=xp.float64))  # [R, V] -> [R, 1]
        values = (xp.take_along_axis(logits, ids, axis=-1) - sums).astype(xp.float32)  # [R, 1 + top]
        ids, values = self._device.copy_of(ids), self._device.copy_of(values)
        return LogProbs(values[:, 0], ids[:, 1:], values[:, 1:])

    def _likeliest(self, logits: Any) -> Answer:
        """The most likely tokens, with flags for NaN and plus infinity. [R, V] -> [R], [R]"""
        self._device.activate()
        rows = self._last.rows_of(logits) if self._last is not None else None
        if self._last is not None and rows is not None:
            return self._last.likeliest(rows)
        self._other.take_likeliest(self._kernels, logits)
        return self._other.likeliest(slice(len(logits)))

    def _drawn(self, logits: Any, draws: list[Draw | None]) -> Answer:
        """One draw for each row, with flags of the rows that have no choice. [R, V] -> [R], [R]"""
        self._device.activate()
        rows = self._last.rows_of(logits) if self._last is not None else None
        answer = self._last.drawn(rows, draws) if self._last is not None and rows is not None else None
        if answer is None:
            self._other.look_at(logits)
            self._other.draw(self._kernels, draws)
            answer = self._other.drawn(slice(len(logits)), draws)
        assert answer is not None
        return answer


class _Empty:
    """Allocates device memory through the interface of an array module."""

    uint32, uint64 = np.uint32, np.uint64

    def __init__(self, device: Device) -> None:
        self._device = device

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._device.empty(shape, dtype, WORKSPACE)
