"""Wraps a backend and reports each operation to an observer.

What checks, counts or times derives from `WrappedBackend` and overrides `observe`, and `before` where an operation's
beginning matters. The layers notice nothing. Every method of `Backend` that a wrapper does not define itself is in one
of the two tables below: operations, which are reported, and the rest, which is passed on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from ..batch import Batch
from ..reference.sampling import Draw
from .base import Backend, Result
from .weights import Weight

Wrapped = TypeVar("Wrapped", bound="WrappedBackend")
Report = tuple[Weight | None, Any, dict[str, Any]]
"""Of one call: the weight, the result to look at, and the arguments that the operation's cost depends on."""

OPERATIONS: dict[str, Callable[..., Report]] = {
    "embed": lambda out, ids, table, positions=None, position_table=None: (
        *(table, out),
        {"position_table": position_table},
    ),
    "linear": lambda out, x, weight, *, activation=None, residual=None: (
        *(weight, out),
        {"x": x, "activation": activation, "residual": residual is not None},
    ),
    "layer_norm": lambda out, x, weight, epsilon: (weight, out, {}),
    "rms_norm": lambda out, x, weight, epsilon: (weight, out, {}),
    "rotary": lambda out, q, k, batch, rotation: (None, out[0], {"k": out[1], "rotation": rotation}),
    "glu": lambda out, x, activation: (None, out, {"activation": activation}),
    "store_kv": lambda out, k, v, cache, layer, batch: (None, k, {}),
    "attend": lambda out, q, cache, layer, batch, *, scale, window=None, slopes=None: (
        *(None, out),
        {"q": q, "cache": cache, "batch": batch, "scale": scale, "window": window, "slopes": slopes},
    ),
    "take_rows": lambda out, x, rows: (None, out, {}),
}
"""Each operation, and its report from the result and the arguments of a call."""

PASSED_ON = (
    *("prepare_weight", "constant", "random_tensor", "format_of"),
    *("position_bytes", "new_pages", "free_memory", "memory_use", "upload"),
    *("to_host", "finite", "argmax", "sample"),
)
"""Methods that are the wrapped backend's own: loading, memory, choosing."""


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

    @property
    def host(self) -> Backend:
        """As the wrapped one."""
        return self.inner.host


def _reported(operation: str, report: Callable[..., Report]) -> Callable[..., Any]:
    def call(self: WrappedBackend, *args: Any, **kwargs: Any) -> Any:
        if operation == "embed":  # each forward pass begins here
            self.layer = None
        self.before(operation)
        out = getattr(self.inner, operation)(*args, **kwargs)
        weight, result, arguments = report(out, *args, **kwargs)
        self.observe(operation, weight, result, **arguments)
        return out

    return call


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: WrappedBackend, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return call


for _name, _report in OPERATIONS.items():
    setattr(WrappedBackend, _name, _reported(_name, _report))
for _name in PASSED_ON:
    setattr(WrappedBackend, _name, _passed_on(_name))


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
