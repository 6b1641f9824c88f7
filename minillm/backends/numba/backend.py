"""The CPU backend of the extra "fast": runs every operation of a step in kernels compiled by Numba.

Weights keep their stored format, 32, 16, 8 or 4 bits, and each is read from memory once for up to 16 rows. Operations
that are not overridden here run as in the reference.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ...batch import Batch
from ...reference.philox import Keys
from ...reference.rotary import Rotation
from ...reference.sampling import Draw
from ..base import Backend, Result
from ..clock import Moments
from ..numpy import NumpyBackend
from ..pages import Pages
from ..weights import Weight
from . import rows
from .activations import ACTIVATION_CODES
from .attention import store_kv
from .cachedtypes import StoredPages, position_bytes
from .choice import Sampler
from .fewrows import linear_few
from .launching import not_recorded, recorded_so_far
from .likeliest import Likeliest
from .manyrows import linear_many
from .steps import MOST_STEPS, Kind, RecordedStep, Workspace, kind_of
from .workers import TELLS_TIME

FEW_ROWS = 16
"""Up to this many rows a product is bound by reading its weights; beyond, by arithmetic."""


class NumbaBackend(Backend):
    """Runs on a CPU with the kernels of this package."""

    name = "numba"
    tells_moments = TELLS_TIME

    def __init__(self, *, weights: str = "auto", cache_dtype: str = "float32") -> None:
        """Set the format of weights, of `weights.FORMATS` or "auto", and the dtype of the K/V cache.

        Raises:
            ParameterError: `cache_dtype` is unknown.
        """
        super().__init__(np, weights=weights)
        self.cache_dtype = cache_dtype
        self._host = NumbaHost()
        self._likeliest: Likeliest | None = None  # in the logits of the pass that ran last
        self._plain = Workspace()
        self._steps: WeakKeyDictionary[object, dict[Kind, RecordedStep[Any]]] = WeakKeyDictionary()
        self._use(self._plain)

    def _use(self, workspace: Workspace) -> None:
        self._workspace, self.arena = workspace, workspace.arena

    def position_bytes(self, K: int, D: int) -> int:
        """Bytes that one position's keys and values take in one layer of the cache."""
        return position_bytes(K, D, self.cache_dtype)

    def new_pages(self, shape: tuple[int, int, int, int, int]) -> Pages:
        """Memory for a K/V cache [L, pages, K, P, D]."""
        return StoredPages(shape, self.cache_dtype)

    # --- a forward pass -------------------------------------------------------------------------------------------

    def run(
        self,
        owner: object,
        batch: Batch,
        rows: Any,
        compute: Callable[[Batch, Any], Result],
        draws: Sequence[Draw | None] = (),
    ) -> Result:
        """Run a small pass as a program, recorded when its kind first runs, and any other pass call by call."""
        result, _ = self._run(owner, batch, rows, compute, watched=False)
        return result

    def run_watched(
        self, owner: object, batch: Batch, rows: Any, compute: Callable[[Batch, Any], Result]
    ) -> tuple[Result, Moments | None]:
        """As `run`; programs also record when each launch ended."""
        return self._run(owner, batch, rows, compute, watched=True)

    def recorded_so_far(self) -> int:
        """Launches so far in the program being recorded."""
        return recorded_so_far()

    def _run(
        self, owner: object, batch: Batch, rows: Any, compute: Callable[[Batch, Any], Result], *, watched: bool
    ) -> tuple[Result, Moments | None]:
        kind = kind_of(batch, rows, FEW_ROWS)
        self._likeliest = None
        if kind is None:
            return compute(*self.upload(batch, rows)), None
        steps = self._steps.setdefault(owner, {})
        step: RecordedStep[Result] | None = steps.pop(kind, None)
        moments: Moments | None = None
        if step is None:
            step = RecordedStep()
            self._use(step.workspace)
            try:
                result = step.record(batch, rows, compute)
            finally:
                self._use(self._plain)
            moments = Moments(step, None, None)
        elif step.complete:
            result = step.run(batch, watched=watched)
            moments = step.moments() if watched else None
        else:
            result = compute(*self.upload(batch, rows))
        self._likeliest = step.likeliest if step.complete else None
        steps[kind] = step  # most recently used last
        if len(steps) > MOST_STEPS:
            del steps[next(iter(steps))]
        return result, moments

    # --- operations -----------------------------------------------------------------------------------------------

    def embed(self, ids: Any, table: Weight, positions: Any = None, position_table: Weight | None = None) -> Any:
        """table[ids], plus position_table[positions]. [T], [T] -> [T, E]"""
        out = self.arena.take((len(ids), table.shape[1]))
        return rows.embed(ids, table.data, out, positions, position_table and position_table.data)

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """activation(x W^T + b) + residual. [T, in] -> [T, out]"""
        if activation not in ACTIVATION_CODES:
            not_recorded()
            return super().linear(x, weight, activation=activation, residual=residual)
        out = self.arena.take((len(x), weight.shape[0]))
        product = linear_few if len(x) <= FEW_ROWS else linear_many
        return product(x, weight.data, weight.bias, out, activation=activation, residual=residual)

    def layer_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """Normalise rows to mean 0 and variance 1, then apply gain and bias. [T, E] -> [T, E]"""
        return rows.layer_norm(x, weight.data, weight.bias, epsilon, self.arena.take(x.shape))

    def rms_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """Normalise rows to mean square 1, then apply gain. [T, E] -> [T, E], by head [T, heads, D] -> [T, heads, D]"""
        return rows.rms_norm(x, weight.data, epsilon, self.arena.take(x.shape))

    def rotary(self, q: Any, k: Any, batch: Batch, rotation: Rotation) -> tuple[Any, Any]:
        """Rotate queries and keys by their positions. [T, H, D], [T, K, D] -> [T, H, D], [T, K, D]"""
        return self._workspace.rotary.rotate(q, k, batch, rotation, self.arena.take(q.shape), self.arena.take(k.shape))

    def glu(self, x: Any, activation: str) -> Any:
        """activation(gate) * up, of the two halves of each row. [T, 2 F] -> [T, F]"""
        if activation not in ACTIVATION_CODES:
            not_recorded()
            return super().glu(x, activation)
        return rows.glu(x, activation, self.arena.take((len(x), x.shape[1] // 2)))

    def store_kv(self, k: Any, v: Any, cache: Pages, layer: int, batch: Batch) -> None:
        """Round the new tokens' keys and values to the cache's dtype and write them to their slots. k, v: [T, K, D]"""
        store_kv(k, v, *cache.layer(layer), batch)

    def attend(
        self,
        q: Any,
        cache: Pages,
        layer: int,
        batch: Batch,
        *,
        scale: float,
        window: int | None = None,
        slopes: Weight | None = None,
    ) -> Any:
        """Causal attention over the cache, sequence by sequence. [T, H, D] -> [T, H, D]"""
        bias = None if slopes is None else slopes.data
        out = self.arena.take(q.shape)
        return self._workspace.attention.attend(q, *cache.layer(layer), batch, scale, out, window=window, slopes=bias)

    def take_rows(self, x: Any, rows: Any) -> Any:
        """The rows whose logits are wanted. [T, E] -> [R, E]"""
        not_recorded()
        return super().take_rows(x, rows)

    # --- logits ---------------------------------------------------------------------------------------------------

    @property
    def host(self) -> Backend:
        """A backend without results kept from a pass, since its callers may change logits in place."""
        return self._host

    def finite(self, logits: Any) -> bool:
        """Whether no logit is NaN or plus infinity; already known for a program's own logits. [R, V]"""
        found = self._likeliest
        return super().finite(logits) if found is None or found.logits is not logits else found.finite()

    def argmax(self, logits: Any) -> Any:
        """The most likely token of each row; already known for a program's own logits. [R, V] -> [R]"""
        found = self._likeliest
        return super().argmax(logits) if found is None or found.logits is not logits else found.tokens()

    def sample(self, logits: Any, keys: Keys, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
        """Sample one token per row from its filtered distribution. [R, V], [R] -> [R]"""
        return self._host.sample(logits, keys, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


class NumbaHost(NumpyBackend):
    """The NumPy backend with sampling by a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self._sampler = Sampler()

    def sample(self, logits: Any, keys: Keys, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
        """Sample one token per row from its filtered distribution. [R, V], [R] -> [R]"""
        return self._sampler.sample(
            logits, keys.uniforms(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
