"""Looking over a backend's shoulder: every call goes through, and something is done with it.

What checks, counts or times derives from `WrappedBackend` and overrides `observe`, and `before` where an
operation's beginning matters. The layers notice nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch
from ..reference.philox import Keys
from ..reference.rotary import Rotation
from ..reference.sampling import Draw
from .base import Backend, Result, Role
from .memory import MemoryUse
from .pages import Pages
from .weights import Tensor, Weight

Wrapped = TypeVar("Wrapped", bound="WrappedBackend")


class WrappedBackend(Backend):
    """Runs each operation on another backend and shows it to `observe`."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner.xp, weights=inner.weights, weight_order=inner.weight_order)
        self.inner = inner
        self.arena = inner.arena
        self.page_size = inner.page_size
        self.name = inner.name
        self.clock = inner.clock
        self.layer: int | None = None
        """The layer that runs; None before the first."""

    def before(self, operation: str) -> None:
        """Called before each operation."""

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Called after each operation, with its result and the arguments that its cost depends on."""

    def prepare_weight(
        self, name: str, tensors: Sequence[Tensor], biases: Sequence[Tensor] = (), role: Role = "projection"
    ) -> Weight:
        """As the wrapped one."""
        return self.inner.prepare_weight(name, tensors, biases, role)

    def constant(self, name: str, values: NDArray[np.float32]) -> Weight:
        """As the wrapped one."""
        return self.inner.constant(name, values)

    def random_tensor(self, name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
        """As the wrapped one."""
        return self.inner.random_tensor(name, shape, seed, std)

    def format_of(self, role: Role) -> str:
        """As the wrapped one."""
        return self.inner.format_of(role)

    def position_bytes(self, K: int, D: int) -> int:
        """As the wrapped one."""
        return self.inner.position_bytes(K, D)

    def new_pages(self, shape: tuple[int, int, int, int, int]) -> Pages:
        """As the wrapped one."""
        return self.inner.new_pages(shape)

    def free_memory(self) -> int:
        """As the wrapped one."""
        return self.inner.free_memory()

    def memory_use(self) -> MemoryUse | None:
        """As the wrapped one."""
        return self.inner.memory_use()

    def upload(self, batch: Batch, rows: Any) -> tuple[Batch, Any]:
        """As the wrapped one."""
        return self.inner.upload(batch, rows)

    def run(
        self,
        owner: object,
        batch: Batch,
        rows: Any,
        compute: Callable[[Batch, Any], Result],
        draws: Sequence[Draw | None] = (),
    ) -> Result:
        """Every operation is called and none replayed, or there would be nothing to see."""
        return compute(*self.upload(batch, rows))

    def enter_layer(self, layer: int) -> None:
        """As the wrapped one."""
        self.layer = layer
        self.inner.enter_layer(layer)

    def embed(self, ids: Any, table: Weight, positions: Any = None, position_table: Weight | None = None) -> Any:
        """As the wrapped one."""
        self.layer = None  # each forward pass begins here
        self.before("embed")
        result = self.inner.embed(ids, table, positions, position_table)
        self.observe("embed", table, result, position_table=position_table)
        return result

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """As the wrapped one."""
        self.before("linear")
        result = self.inner.linear(x, weight, activation=activation, residual=residual)
        self.observe("linear", weight, result, x=x, activation=activation, residual=residual is not None)
        return result

    def layer_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """As the wrapped one."""
        self.before("layer_norm")
        result = self.inner.layer_norm(x, weight, epsilon)
        self.observe("layer_norm", weight, result)
        return result

    def rms_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """As the wrapped one."""
        self.before("rms_norm")
        result = self.inner.rms_norm(x, weight, epsilon)
        self.observe("rms_norm", weight, result)
        return result

    def rotary(self, q: Any, k: Any, batch: Batch, rotation: Rotation) -> tuple[Any, Any]:
        """As the wrapped one."""
        self.before("rotary")
        q, k = self.inner.rotary(q, k, batch, rotation)
        self.observe("rotary", None, q, k=k, rotation=rotation)
        return q, k

    def glu(self, x: Any, activation: str) -> Any:
        """As the wrapped one."""
        self.before("glu")
        result = self.inner.glu(x, activation)
        self.observe("glu", None, result, activation=activation)
        return result

    def store_kv(self, k: Any, v: Any, cache: Pages, layer: int, batch: Batch) -> None:
        """As the wrapped one."""
        self.before("store_kv")
        self.inner.store_kv(k, v, cache, layer, batch)
        self.observe("store_kv", None, k)

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
        """As the wrapped one."""
        self.before("attend")
        how: dict[str, Any] = {"scale": scale, "window": window, "slopes": slopes}
        result = self.inner.attend(q, cache, layer, batch, **how)
        self.observe("attend", None, result, q=q, cache=cache, batch=batch, **how)
        return result

    def take_rows(self, x: Any, rows: Any) -> Any:
        """As the wrapped one."""
        self.before("take_rows")
        result = self.inner.take_rows(x, rows)
        self.observe("take_rows", None, result)
        return result

    @property
    def host(self) -> Backend:
        """As the wrapped one."""
        return self.inner.host

    def to_host(self, array: Any) -> Any:
        """As the wrapped one."""
        return self.inner.to_host(array)

    def finite(self, logits: Any) -> bool:
        """As the wrapped one."""
        return self.inner.finite(logits)

    def argmax(self, logits: Any) -> Any:
        """As the wrapped one."""
        return self.inner.argmax(logits)

    def sample(self, logits: Any, keys: Keys, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
        """As the wrapped one."""
        return self.inner.sample(logits, keys, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


class Runs(Protocol):
    """What runs its operations on an exchangeable backend: a `Runner`."""

    backend: Backend


@contextmanager
def put_between(runner: Runs, wrapped: Wrapped) -> Iterator[Wrapped]:
    """Let a runner run on a wrapped backend inside the `with` block, and on the one before afterwards."""
    inner = runner.backend
    runner.backend = wrapped
    try:
        yield wrapped
    finally:
        runner.backend = inner
