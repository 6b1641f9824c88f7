"""Counting what really ran: every operation's FLOPs and bytes, by operation and layer.

What an operation costs stands beside it in `reference/`; here those costs are only called, with the shapes of the calls
that were made, and added up. `accounting/` says the same from a configuration and a schedule alone, and the two must
agree.

    with counting(engine.runner) as counted:
        engine.generate(prompt)
    counted.total.flops

The choice of a token is not counted: `argmax` takes no FLOPs, and those of `sample` depend on the numbers themselves.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..reference.attention import cost as attention_cost
from ..reference.cost import Cost
from ..reference.embed import cost as embed_cost
from ..reference.glu import cost as glu_cost
from ..reference.kv import cost as kv_cost
from ..reference.linear import cost as linear_cost
from ..reference.norm import cost as norm_cost
from ..reference.norm import rms_norm_cost
from ..reference.rotary import Rotation
from ..reference.rotary import cost as rotary_cost
from .base import Backend
from .weights import Weight
from .wrapping import Runs, WrappedBackend, put_between


class CountingBackend(WrappedBackend):
    """Adds up what the calls that go through it cost."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.costs: dict[tuple[str, int | None], Cost] = {}
        """Operation and layer -> cost. None is before the first layer, the number L after the last"""

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Add one call."""
        key = operation, self.layer
        self.costs[key] = self.costs.get(key, Cost(0)) + _COSTS[operation](self.inner, weight, result, **arguments)

    @property
    def total(self) -> Cost:
        """All calls since the beginning or the last `reset`."""
        return sum(self.costs.values(), Cost(0))

    def by_operation(self) -> dict[str, Cost]:
        """Each operation's cost, all layers together."""
        return self._grouped(lambda operation, _: operation)

    def by_layer(self) -> dict[int | None, Cost]:
        """Each layer's cost, all operations together."""
        return self._grouped(lambda _, layer: layer)

    def reset(self) -> None:
        """Begin again at nothing."""
        self.costs.clear()

    def _grouped(self, group: Callable[[str, int | None], Any]) -> dict[Any, Cost]:
        groups: dict[Any, Cost] = {}
        for (operation, layer), cost in self.costs.items():
            key = group(operation, layer)
            groups[key] = groups.get(key, Cost(0)) + cost
        return groups


def counting(runner: Runs) -> AbstractContextManager[CountingBackend]:
    """Count what a runner computes inside the `with` block; it costs a few microseconds for each operation."""
    return put_between(runner, CountingBackend(runner.backend))


def _embed(_: Backend, table: Weight, result: Any, *, position_table: Weight | None) -> Cost:
    learned = 0 if position_table is None else position_table.nbytes // position_table.shape[0]
    rows, width = result.shape
    return embed_cost(rows, width, table.nbytes // table.shape[0], learned, result.itemsize)


def _linear(_: Backend, weight: Weight, result: Any, *, x: Any, activation: str | None, residual: bool) -> Cost:
    outputs, inputs = weight.shape
    return linear_cost(
        len(result),
        inputs,
        outputs,
        weight.nbytes,
        bias=weight.bias is not None,
        activation=activation,
        residual=residual,
        number_bytes=x.itemsize,
        result_bytes=result.itemsize,
    )


def _layer_norm(_: Backend, weight: Weight, result: Any) -> Cost:
    return norm_cost(*result.shape, affine=weight.data is not None, number_bytes=result.itemsize)


def _store_kv(backend: Backend, _: None, k: Any) -> Cost:
    T, K, D = k.shape
    return kv_cost(T, K, D, backend.position_bytes(K, D), k.itemsize)


def _rms_norm(_: Backend, weight: Weight, result: Any) -> Cost:
    rows, width = result.size // result.shape[-1], result.shape[-1]
    return rms_norm_cost(rows, width, affine=weight.data is not None, number_bytes=result.itemsize)


def _rotary(_: Backend, __: None, q: Any, *, k: Any, rotation: Rotation) -> Cost:
    T, H, D = q.shape
    scaled, stretched = rotation.scale != 1, rotation.stretch is not None
    half, heads = len(rotation.frequencies.data), H + k.shape[1]
    return rotary_cost(T, heads, D, half, scaled=scaled, stretched=stretched, number_bytes=q.itemsize)


def _glu(_: Backend, __: None, result: Any, *, activation: str) -> Cost:
    T, F = result.shape
    return glu_cost(T, F, activation, result.itemsize)


def _attend(
    backend: Backend,
    _: None,
    result: Any,
    *,
    q: Any,
    cache: Any,
    batch: Any,
    scale: float,
    window: int | None,
    slopes: Weight | None,
) -> Cost:
    _, H, D = q.shape
    position_bytes = backend.position_bytes(cache.heads, D)
    return attention_cost(batch, H, D, position_bytes, q.itemsize, window=window, biased=slopes is not None)


def _take_rows(_: Backend, __: None, result: Any) -> Cost:
    rows, width = result.shape
    return embed_cost(rows, width, result.itemsize * width, 0, result.itemsize)


_COSTS: dict[str, Callable[..., Cost]] = {
    "embed": _embed,
    "linear": _linear,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "glu": _glu,
    "store_kv": _store_kv,
    "attend": _attend,
    "take_rows": _take_rows,
}
"""Each operation that `WrappedBackend` shows -> its cost. One that is missing here fails, and is not left uncounted."""
