"""Wraps a backend and reports each operation to an observer: to check, count or time a forward pass.

An observer derives from `WrappedBackend` and overrides `observe`, and `before` if it needs the start of an operation.
The operations are those with a cost in `COSTS`; loader, memory and chooser are the wrapped backend's own.

- `CheckingBackend` finds where NaN or infinity begins.
- `CountingBackend` counts what actually ran: every operation's FLOPs and bytes, by operation and layer. The cost
  functions are defined with the operations in `reference/`, and called here with the shapes of the actual calls.
  `accounting/` runs a model of shapes under it: the costs of a configuration and a schedule alone. The choice of a
  token is not counted: `argmax` takes no FLOPs, and those of `sample` depend on the values of the logits.

      with counting(engine.runner) as counted:
          engine.generate(prompt)
      counted.total.flops

- `TimingBackend` records when each operation of a forward pass ran, and its cost. It takes two timestamps for each
  call and keeps the arguments of its cost; `take` computes the rest between two steps, where it delays nothing. A pass
  that is replayed records itself when its launches ended.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import Parameter, signature
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np

from ..batch import Batch
from ..errors import NumericalError
from ..reference.activation import glu_cost, scale_logits_cost
from ..reference.attention import AttentionSpec, attention_cost, kv_cost
from ..reference.cost import Cost
from ..reference.experts import Routing, combine_cost, linear_experts_cost, route_cost
from ..reference.linear import embed_cost, linear_cost, reduce_cost
from ..reference.low_rank import low_rank_cost
from ..reference.norm import layer_norm_cost, rms_norm_cost
from ..reference.rotary import Rotation, rotary_cost
from ..reference.sampling import Draw
from .memory import Moments
from .operations import Backend
from .recording import Result
from .weights import Weight

Wrapped = TypeVar("Wrapped", bound="WrappedBackend")


class WrappedBackend(Backend):
    """Runs each operation on another backend and reports it to `observe`."""

    replays = False  # a replayed pass would report no operation
    only_looks = True
    """Whether it leaves all results as they are, as a class has to say of itself; others may change them in place"""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner.loader, inner.memory, inner.chooser)
        self.inner = inner
        self.changes_results = inner.changes_results or not vars(type(self)).get("only_looks", False)
        self.name, self.rank, self.ranks = inner.name, inner.rank, inner.ranks
        self.layer: int | None = None
        """The current layer; None before the first."""

    def before(self, operation: str) -> None:
        """Called before each operation."""

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Called after each operation, with its weight or table, its result, and its other arguments by name."""

    def enter_layer(self, layer: int) -> None:
        """As the wrapped backend."""
        self.layer = layer
        self.inner.enter_layer(layer)


def _reported(operation: str) -> Callable[..., Any]:
    parameters = list(signature(getattr(Backend, operation)).parameters.values())[1:]  # without self
    names = [parameter.name for parameter in parameters]
    defaults = {each.name: each.default for each in parameters if each.default is not Parameter.empty}
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


class Runs(Protocol):
    """An object that runs operations on an exchangeable backend, such as a `Runner`."""

    backend: Backend


@contextmanager
def put_between(runner: Runs, wrapped: Wrapped) -> Iterator[Wrapped]:
    """Make a runner use a wrapped backend inside the `with` block, and restore its own afterwards.

    Unless the wrapper says that it `only_looks`, what is computed in the block takes over no keys and values of other
    texts, and none takes over those of the block.
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

    found: NumericalError | None = None
    """The error of the first number that is not finite; not raised, since other ranks may wait for the rest"""

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Note the first number that is not finite."""
        if self.found is not None:
            return
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        if all(np.isfinite(self.chooser.to_host(each)).all() for each in results):
            return
        where = "before the first layer" if self.layer is None else f"in layer {self.layer}"
        weights = [w.name for w in (weight, *arguments.values()) if isinstance(w, Weight)]
        what = f"{operation} with {' and '.join(weights)}" if weights else operation
        self.found = NumericalError(
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
        key = operation, self.layer
        self.costs[key] = self.costs.get(key, Cost(0)) + COSTS[operation](self.inner, weight, result, **arguments)

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


def _embed(
    _: Backend,
    table: Weight,
    result: Any,
    *,
    position_table: Weight | None,
    type_table: Weight | None,
    scale: float,
    **__: Any,
) -> Cost:
    tables = (table, position_table, type_table)
    row, *learned = (0 if each is None else each.data.nbytes // each.shape[0] for each in tables)
    rows, width = result.shape
    return embed_cost(rows, width, row, learned[0], result.itemsize, type_row_bytes=learned[1], scaled=scale != 1)


def _linear(_: Backend, weight: Weight, result: Any, *, x: Any, activation: str | None, residual: Any) -> Cost:
    outputs, inputs = weight.shape
    return linear_cost(
        len(result),
        inputs,
        outputs,
        weight.nbytes,
        bias=weight.bias is not None,
        activation=activation,
        residual=residual is not None,
        number_bytes=x.itemsize,
        result_bytes=result.itemsize,
    )


def _add_low_rank(
    _: Backend, __: None, result: Any, *, x: Any, parts: Any, activation: str | None, residual: Any, **___: Any
) -> Cost:
    return low_rank_cost(
        len(x),
        x.shape[1],
        result.shape[1],
        [(len(rows), change.down.shape[0]) for rows, change in parts],
        activation=activation,
        residual=residual is not None,
        number_bytes=x.itemsize,
    )


def _layer_norm(_: Backend, weight: Weight, result: Any, **__: Any) -> Cost:
    return layer_norm_cost(*result.shape, affine=weight.data is not None, number_bytes=result.itemsize)


def _rms_norm(_: Backend, weight: Weight, result: Any, *, residual: Any, **__: Any) -> Cost:
    rows, width = result.size // result.shape[-1], result.shape[-1]
    affine = weight.data is not None
    return rms_norm_cost(rows, width, affine=affine, residual=residual is not None, number_bytes=result.itemsize)


def _rotary(_: Backend, __: None, result: Any, *, q: Any, k: Any, rotation: Rotation, **___: Any) -> Cost:
    T, H, D = q.shape
    scaled, stretched = rotation.scale != 1, rotation.stretch is not None
    return rotary_cost(
        T, H + k.shape[1], D, rotation.pairs, scaled=scaled, stretched=stretched, number_bytes=q.itemsize
    )


def _glu(_: Backend, __: None, result: Any, *, activation: str, **___: Any) -> Cost:
    T, F = result.shape
    return glu_cost(T, F, activation, result.itemsize)


def _route(_: Backend, __: None, result: Routing, *, logits: Any, k: int, normalised: bool) -> Cost:
    T, X = logits.shape
    return route_cost(T, X, k, normalised=normalised)


def _linear_experts(_: Backend, weight: Weight, result: Any, *, x: Any, routing: Routing) -> Cost:
    experts, outputs, inputs = weight.shape
    used, number_bytes = routing.used, result.itemsize
    return linear_experts_cost(len(x), inputs, outputs, weight.nbytes // experts, used, number_bytes)


def _combine(_: Backend, __: None, result: Any, *, routing: Routing, residual: Any, **___: Any) -> Cost:
    (T, k), E = routing.weights.shape, result.shape[1]
    return combine_cost(T, E, k, residual=residual is not None, number_bytes=result.itemsize)


def _store_kv(backend: Backend, _: None, __: None, *, k: Any, **___: Any) -> Cost:
    T, K, D = k.shape
    return kv_cost(T, K, D, backend.memory.position_bytes(K, D), k.itemsize)


def _attend(
    backend: Backend, _: None, __: Any, *, q: Any, cache: Any, layer: int, batch: Batch, spec: AttentionSpec
) -> Cost:
    _, H, D = q.shape
    rows = batch.over_sources if spec.cross else batch
    return attention_cost(rows, H, D, backend.memory.position_bytes(cache.heads, D), spec, q.itemsize)


def _take_rows(_: Backend, __: None, result: Any, **___: Any) -> Cost:
    rows, width = result.shape
    return embed_cost(rows, width, result.itemsize * width, 0, result.itemsize)


def _scale_logits(_: Backend, __: None, result: Any, *, scale: float, cap: float | None, **___: Any) -> Cost:
    return scale_logits_cost(*result.shape, scaled=scale != 1, capped=cap is not None)


def _reduce(backend: Backend, _: None, result: Any, **__: Any) -> Cost:
    return reduce_cost(result.size, backend.ranks, result.itemsize)


COSTS: dict[str, Callable[..., Cost]] = {
    "embed": _embed,
    "linear": _linear,
    "add_low_rank": _add_low_rank,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "glu": _glu,
    "route": _route,
    "linear_experts": _linear_experts,
    "combine": _combine,
    "store_kv": _store_kv,
    "attend": _attend,
    "take_rows": _take_rows,
    "scale_logits": _scale_logits,
    "reduce": _reduce,
}
"""Operation -> its cost, of the backend and the arguments of `observe`. An operation that is missing here fails rather
than going uncounted."""

for _name in COSTS:
    setattr(WrappedBackend, _name, _reported(_name))


@runtime_checkable
class Replaying(Protocol):
    """The memory of a backend that replays passes, and can record when their launches ended."""

    tells_moments: bool
    """Whether it can record times on this system"""

    def run_watched(
        self, owner: object, batch: Batch, rows: Any, compute: Callable[[Batch, Any], Result]
    ) -> tuple[Result, Moments | None]:
        """As `Memory.run`; also returns the times of a pass that was recorded or replayed."""

    def recorded_so_far(self) -> int:
        """Launches so far in the pass that is being recorded; 0 if none is."""


class Call(NamedTuple):
    """One operation that ran."""

    operation: str
    weight: str
    """The weight's name without its layer's: "fc1"; empty for an operation without weights"""
    layer: int | None
    """None before the first, the number L after the last"""
    began: float
    """Seconds since the mark that `take` is given"""
    seconds: float
    cost: Cost | None
    """None for what is not counted: checking logits, choosing tokens, and copies to and from a device"""

    @property
    def name(self) -> str:
        """Operation and weight: "linear fc1"."""
        return f"{self.operation} {self.weight}".rstrip()

    @property
    def ended(self) -> float:
        """Seconds since the mark that `take` is given."""
        return self.began + self.seconds


class _Noted(NamedTuple):
    """A call as recorded, before its times and cost are computed."""

    operation: str
    layer: int | None
    began: Any
    ended: Any
    weight: Weight | None = None
    result: Any = None
    arguments: dict[str, Any] | None = None
    """Arguments of the cost function; None where the call is not counted"""
    launches: int = 0
    """Launches in the recorded pass when the call had ended"""


class _Replay(NamedTuple):
    """A pass that was replayed."""

    batch: Batch
    moments: Moments


class _Owner:
    """The owner under which a pass is recorded while it is timed."""


class Replaced:
    """An object with other versions of some of its methods."""

    def __init__(self, inner: Any, **methods: Callable[..., Any]) -> None:
        self._inner = inner
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TimingBackend(WrappedBackend):
    """Records when operations begin and end, and the uploads, checks of logits and choices of tokens between them.

    For a pass that the wrapped backend replays, the operations are those noted when it was recorded (under an owner of
    this wrapper), and their times follow from when each launch ended.
    """

    only_looks = True

    memory: Any
    chooser: Any

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        memory, chooser = inner.memory, inner.chooser
        self._replaying: Replaying | None = None
        if inner.replays and isinstance(memory, Replaying) and memory.tells_moments:
            self._replaying = memory
        self.replays = self._replaying is not None
        self.clock = memory.clock
        self._mark = self.clock.mark
        self.memory = Replaced(memory, upload=self._uncounted("upload", memory.upload), run=self._run)
        choices = {name: getattr(chooser, name) for name in ("to_host", "finite", "argmax", "sample")}
        self.chooser = Replaced(chooser, **{name: self._uncounted(name, call) for name, call in choices.items()})
        self._began: Any = None
        self._noted: list[Any] = []  # `_Replay`, or `_Noted` as a tuple, which is faster to make
        self._counting = CountingBackend(inner)
        self._owners: WeakKeyDictionary[object, _Owner] = WeakKeyDictionary()
        self._recorded: WeakKeyDictionary[object, list[_Noted]] = WeakKeyDictionary()

    def _run(
        self,
        owner: object,
        batch: Batch,
        rows: Any,
        compute: Callable[[Batch, Any], Result],
        draws: Sequence[Draw | None] = (),
    ) -> Result:
        """`Memory.run` of passes that the wrapped backend replays and times."""
        assert self._replaying is not None
        first = len(self._noted)

        def computed(batch: Batch, rows: Any) -> Result:
            del self._noted[first:]  # of an attempt to record that came to nothing
            return compute(batch, rows)

        owner = self._owners.setdefault(owner, _Owner())
        result, moments = self._replaying.run_watched(owner, batch, rows, computed)
        if moments is not None and moments.ended is None:
            self._recorded[moments.step] = [_Noted(*noted) for noted in self._noted[first:]]
        elif moments is not None:
            self._noted.append(_Replay(batch, moments))
        return result

    def before(self, operation: str) -> None:
        """Note the start time."""
        self._began = self._mark()

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Note the end time."""
        launches = 0 if self._replaying is None else self._replaying.recorded_so_far()
        self._noted.append((operation, self.layer, self._began, self._mark(), weight, result, arguments, launches))

    def take(self, start: Any) -> list[Call]:
        """All calls since the last `take`, with times relative to the mark `start`."""
        seconds = self.clock.seconds
        calls = [
            Call(
                noted.operation,
                "" if noted.weight is None else re.sub(r"^layers\.\d+\.", "", noted.weight.name),
                noted.layer,
                seconds(start, noted.began),
                seconds(noted.began, noted.ended),
                self._cost(noted),
            )
            for noted in self._all_noted()
        ]
        self._noted.clear()
        return calls

    def _all_noted(self) -> Iterator[_Noted]:
        """All calls, including those of replayed passes."""
        for one in self._noted:
            if not isinstance(one, _Replay):
                yield _Noted(*one)
                continue
            began, launches = one.moments.began, 0
            for noted in self._recorded[one.moments.step]:
                ended = one.moments.ended[noted.launches - 1] if noted.launches > launches else began
                arguments = noted.arguments
                if arguments is not None and "batch" in arguments:
                    arguments = arguments | {"batch": one.batch}
                yield noted._replace(began=began, ended=ended, arguments=arguments)
                began, launches = ended, noted.launches

    def _cost(self, noted: _Noted) -> Cost | None:
        """The cost of a call, by the counting backend."""
        if noted.arguments is None:
            return None
        self._counting.reset()
        self._counting.observe(noted.operation, noted.weight, noted.result, **noted.arguments)
        return self._counting.total

    def _uncounted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A version of a method that is noted, and is not part of the model."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self._mark()
            answer = call(*args, **kwargs)
            self._noted.append((name, None, began, self._mark()))
            return answer

        return timed
