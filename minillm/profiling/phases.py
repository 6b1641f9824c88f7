"""The result of profiling: steps, split into layers and operations, with their floors."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from ..backends.observe import Call
from ..hardware import Hardware
from ..reference.cost import Cost

PhaseName = Literal["prefill", "decode"]
Place = Literal["embedding", "layers", "head", "beside the model"]
PLACES: tuple[Place, ...] = ("embedding", "layers", "head", "beside the model")


@dataclass(frozen=True)
class Ceilings:
    """Peak rates that bound an operation."""

    hardware: Hardware
    arithmetic: str = "float32"
    """The dtype in which products are computed, whatever the weights' format"""

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.hardware.bandwidth

    @property
    def rate(self) -> float:
        """FLOPs per second."""
        return self.hardware.rate(self.arithmetic)

    def floor(self, cost: Cost) -> float:
        """Minimum seconds of an operation, unless its data is in the processor's cache."""
        return self.hardware.seconds(cost.flops, cost.bytes_read + cost.bytes_written, self.arithmetic)


@dataclass(frozen=True)
class Step:
    """One step of the loop."""

    phase: PhaseName
    """Prefill if the step computes any prompt tokens, as in `Engine.stats`"""
    tokens: int
    """Tokens computed by its forward pass"""
    seconds: float
    plain_seconds: float
    """Time of the same step without profiling"""
    calls: list[Call]


@dataclass(frozen=True)
class Row:
    """All calls of one operation on one weight, summed over layers."""

    place: Place
    name: str
    calls: int
    cost: Cost | None
    """Total cost; None if not counted"""
    seconds: float
    floor: float
    """Sum of the floors of the calls; 0 if not counted"""

    @property
    def ratio(self) -> float | None:
        """Measured time over floor. Below 1 data came from the processor's cache and not from memory."""
        return self.seconds / self.floor if self.floor else None


class Span(NamedTuple):
    """One layer of one forward pass, from the beginning of its first operation to the end of its last."""

    layer: int | None
    calls: list[Call]

    @property
    def began(self) -> float:
        """Seconds since the step began."""
        return self.calls[0].began

    @property
    def seconds(self) -> float:
        """Duration, including the time between its operations."""
        return self.calls[-1].ended - self.began


class Layer(NamedTuple):
    """One layer over all steps of a phase."""

    layer: int | None
    """None: before the first layer; L: after the last"""
    seconds: float
    floor: float


@dataclass(frozen=True)
class Phase:
    """All steps of one kind."""

    steps: list[Step]
    num_layers: int
    ceilings: Ceilings
    """Ceilings from which the floors follow"""

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return sum(step.tokens for step in self.steps)

    @property
    def seconds(self) -> float:
        """Total time of all steps."""
        return sum(step.seconds for step in self.steps)

    @cached_property
    def rows(self) -> list[Row]:
        """One row per operation and weight, in the order of the forward pass."""
        groups: dict[tuple[Place, str], list[Call]] = defaultdict(list)
        for step in self.steps:
            for call in step.calls:
                groups[self._place(call), call.name].append(call)
        rows = [self._row(place, name, calls) for (place, name), calls in groups.items()]
        return sorted(rows, key=lambda row: PLACES.index(row.place))

    def _place(self, call: Call) -> Place:
        if call.cost is None:
            return "beside the model"
        if call.layer is None:
            return "embedding"
        return "head" if call.layer == self.num_layers else "layers"

    def _row(self, place: Place, name: str, calls: list[Call]) -> Row:
        costs = [call.cost for call in calls if call.cost is not None]
        cost = sum(costs, Cost(0)) if costs else None
        floor = sum(self.ceilings.floor(one) for one in costs)
        return Row(place, name, len(calls), cost, sum(call.seconds for call in calls), floor)

    @cached_property
    def layers(self) -> list[Layer]:
        """One entry per layer, plus the parts before and after the layers."""
        seconds: dict[int | None, float] = defaultdict(float)
        floors: dict[int | None, float] = defaultdict(float)
        for step in self.steps:
            for span in layer_spans(step.calls):
                seconds[span.layer] += span.seconds
                floors[span.layer] += sum(self.ceilings.floor(call.cost) for call in span.calls if call.cost)
        return [Layer(layer, taken, floors[layer]) for layer, taken in seconds.items()]

    @property
    def cost(self) -> Cost:
        """Total cost of all counted operations."""
        return sum((row.cost for row in self.rows if row.cost is not None), Cost(0))

    @property
    def floor(self) -> float:
        """Sum of the floors of all operations."""
        return sum(row.floor for row in self.rows)

    @property
    def in_operations(self) -> float:
        """Total seconds inside operations."""
        return sum(row.seconds for row in self.rows)

    @property
    def between_operations(self) -> float:
        """Seconds inside forward passes but outside operations: the layers' own Python."""
        spans = sum(calls[-1].ended - calls[0].began for step in self.steps for calls in _passes(step.calls))
        return spans - sum(call.seconds for step in self.steps for call in step.calls if call.cost is not None)

    @property
    def around(self) -> float:
        """All other seconds: scheduler, cache, strategy and batch construction."""
        return self.seconds - self.in_operations - self.between_operations


def layer_spans(calls: Iterable[Call]) -> Iterator[Span]:
    """Split a step's calls into layers, in execution order. Operations outside the model belong to none."""
    for forward in _passes(calls):
        group: list[Call] = []
        for call in forward:
            if group and group[-1].layer != call.layer:
                yield Span(group[0].layer, group)
                group = []
            group.append(call)
        yield Span(group[0].layer, group)


def _passes(calls: Iterable[Call]) -> list[list[Call]]:
    """Split a step's calls into forward passes: each begins with an embedding."""
    passes: list[list[Call]] = []
    for call in calls:
        if call.operation == "embed":
            passes.append([])
        if call.cost is not None:
            passes[-1].append(call)
    return passes


@dataclass(frozen=True)
class Profile:
    """The profile of a run."""

    steps: list[Step]
    num_layers: int
    ceilings: Ceilings
    """Ceilings from which the floors follow"""

    @cached_property
    def phases(self) -> dict[PhaseName, Phase]:
        """The phases that had at least one step."""
        names: tuple[PhaseName, ...] = ("prefill", "decode")
        groups = {name: [step for step in self.steps if step.phase == name] for name in names}
        return {name: Phase(steps, self.num_layers, self.ceilings) for name, steps in groups.items() if steps}

    @property
    def overhead(self) -> list[float]:
        """Profiling overhead of each step relative to the plain step, in ascending order."""
        return sorted(step.seconds / step.plain_seconds - 1 for step in self.steps)

    @property
    def median_overhead(self) -> float:
        """Median overhead of all steps."""
        return statistics.median(self.overhead)
