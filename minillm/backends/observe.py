"""Wraps a backend and reports each operation to an observer: to check, count or time a forward pass.

An observer derives from `WrappedBackend` and overrides `observe`, and `before` if it needs the start of an operation.
The operations are `COSTS`' keys; loader, memory and sampler are the wrapped backend's own.

- `CheckingBackend` finds where NaN or infinity begins.
- `CountingBackend` counts what actually ran: every operation's FLOPs and bytes, by operation and layer, from the shapes
  of the actual calls (`operation_costs.py`). `accounting/` runs a model of shapes under it: the costs of a
  configuration and a schedule alone. The choice of a token is not counted: `argmax` takes no FLOPs, and those of
  `sample` depend on the values of the logits.

      with counting(engine.runner) as counted:
          engine.generate(prompt)
      counted.total.flops

- `TimingBackend` (`timing.py`) records when each operation ran.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import numpy as np

from ..errors import NumericalError
from ..reference.cost import Cost
from .operation_costs import COSTS
from .operations import Backend
from .weights import Weight

Wrapped = TypeVar("Wrapped", bound="WrappedBackend")


class WrappedBackend(Backend):
    """Runs each operation on another backend and reports it to `observe`."""

    replays = False  # a replayed pass would report no operation
    only_looks = True
    """Whether it leaves all results as they are, as a class has to say of itself; others may change them in place"""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner.loader, inner.memory, inner.sampler)
        self.inner = inner
        self.changes_results = inner.changes_results or not vars(type(self)).get("only_looks", False)
        self.name, self.rank, self.ranks = inner.name, inner.rank, inner.ranks
        self.layer: int | None = None
        """The current layer; None before the first."""

    def before(self, operation: str) -> None:
        """Called before each operation."""

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Called after each operation, with its weight or table, its result, and its other arguments by name."""

    def enter_layer(self, layer: int, x: Any = None) -> None:
        """As the wrapped backend."""
        self.layer = layer
        self.inner.enter_layer(layer, x)


def _reported(operation: str) -> Callable[..., Any]:
    parameters = list(signature(getattr(Backend, operation)).parameters.values())[1:]  # without self
    names = [parameter.name for parameter in parameters]
    defaults = {
        parameter.name: parameter.default for parameter in parameters if parameter.default is not Parameter.empty
    }
    weight = next((name for name in names if name in ("weight", "table")), "")

    def call(self: WrappedBackend, *args: Any, **kwargs: Any) -> Any:
        if operation == "embed":  # each forward pass begins here
            self.layer = None
        self.before(operation)
        out = getattr(self.inner, operation)(*args, **kwargs)
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        self.observe(operation, arguments.pop(weight, None), out, **arguments)
        return out

    return call


for _name in COSTS:
    setattr(WrappedBackend, _name, _reported(_name))


class Runs(Protocol):
    """An object that runs operations on an exchangeable backend, such as a `Runner`."""

    backend: Backend


@contextmanager
def put_between(runner: Runs, wrapped: Wrapped) -> Iterator[Wrapped]:
    """Make a runner use a wrapped backend inside the `with` block, and restore its own afterwards.

    Unless the wrapper says that it `only_looks`, what is computed in the block takes over no keys and values of other
    texts, and none takes over the block's.
    """
    inner = runner.backend
    runner.backend = wrapped
    try:
        yield wrapped
    finally:
        runner.backend = inner


class CheckingBackend(WrappedBackend):
    """Checks every result for NaN and infinity; the error names the first operation and its layer."""

    only_looks = True

    error: NumericalError | None = None
    """The error of the first number that is not finite; not raised, since other ranks may wait for the rest"""

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Note the first number that is not finite."""
        if self.error is not None:
            return
        results = result if isinstance(result, tuple) else (result,)
        if all(np.isfinite(self.sampler.to_host(array)).all() for array in results if array is not None):
            return
        where = "before the first layer" if self.layer is None else f"in layer {self.layer}"
        weights = [w.name for w in (weight, *arguments.values()) if isinstance(w, Weight)]
        what = f"{operation} with {' and '.join(weights)}" if weights else operation
        self.error = NumericalError(
            f"NaN or infinity {where}, made by {what}: the weights hold such a value or their numbers outgrow float32"
        )


class CountingBackend(WrappedBackend):
    """Adds up the cost of the calls passed through it."""

    only_looks = True

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.costs: dict[tuple[str, int | None], Cost] = {}
        """Operation and layer -> cost. None is before the first layer, the number L after the last"""

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Add one call."""
        call = SimpleNamespace(backend=self.inner, weight=weight, result=result, **arguments)
        key = operation, self.layer
        self.costs[key] = self.costs.get(key, Cost(0)) + COSTS[operation](call)

    @property
    def total(self) -> Cost:
        """Cost of all calls since construction or the last `reset`."""
        return sum(self.costs.values(), Cost(0))

    def by_operation(self) -> dict[str, Cost]:
        """Each operation's cost, all layers together."""
        return self._grouped(lambda operation, _: operation)

    def by_layer(self) -> dict[int | None, Cost]:
        """Each layer's cost, all operations together."""
        return self._grouped(lambda _, layer: layer)

    def reset(self) -> None:
        """Set all costs to zero."""
        self.costs.clear()

    def _grouped(self, group: Callable[[str, int | None], Any]) -> dict[Any, Cost]:
        groups: dict[Any, Cost] = {}
        for (operation, layer), cost in self.costs.items():
            key = group(operation, layer)
            groups[key] = groups.get(key, Cost(0)) + cost
        return groups


def counting(runner: Runs) -> AbstractContextManager[CountingBackend]:
    """Count the cost of what a runner computes inside the `with` block; adds a few microseconds per operation."""
    return put_between(runner, CountingBackend(runner.backend))
