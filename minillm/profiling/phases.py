"""What a profile says: steps, cut into layers and operations, and the floors beside them."""

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
    """What an operation can reach at most."""

    hardware: Hardware
    arithmetic: str = "float32"
    """The dtype that products are of, however weights are kept"""

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.hardware.bandwidth

    @property
    def rate(self) -> float:
        """FLOPs a second."""
        return self.hardware.rate(self.arithmetic)

    def floor(self, cost: Cost) -> float:
        """Seconds below which an operation cannot come, unless its numbers lie in a processor's cache."""
        return self.hardware.seconds(cost.flops, cost.bytes_read + cost.bytes_written, self.arithmetic)


@dataclass(frozen=True)
class Step:
    """One step of the loop."""

    phase: PhaseName
    """A step with any part of a prompt is prefill, as in `Engine.stats`"""
    tokens: int
    """That its forward pass computed"""
    seconds: float
    plain_seconds: float
    """The same step without watching"""
    calls: list[Call]


@dataclass(frozen=True)
class Row:
    """All calls of one operation on one weight, all layers together."""

    place: Place
    name: str
    calls: int
    cost: Cost | None
    """Sum; None for what is not counted"""
    seconds: float
    floor: float
    """The least that the ceilings allow, call by call; 0 for what is not counted"""

    @property
    def ratio(self) -> float | None:
        """Measured over floor. Below 1 the numbers came from a processor's cache and not from memory."""
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
        """With what lies between its operations."""
        return self.calls[-1].ended - self.began


class Layer(NamedTuple):
    """One layer over all steps of a phase."""

    layer: int | None
    """None is what comes before the first, the number L what comes after the last"""
    seconds: float
    floor: float


@dataclass(frozen=True)
class Phase:
    """All steps of one kind."""

    steps: list[Step]
    num_layers: int
    ceilings: Ceilings
    """What the floors stand on"""

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return sum(step.tokens for step in self.steps)

    @property
    def seconds(self) -> float:
        """The whole: all steps from beginning to end."""
        return sum(step.seconds for step in self.steps)

    @cached_property
    def rows(self) -> list[Row]:
        """One for each operation and weight, in the order of the forward pass."""
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
        """Each layer, with what lies before and after them."""
        seconds: dict[int | None, float] = defaultdict(float)
        floors: dict[int | None, float] = defaultdict(float)
        for step in self.steps:
            for span in layer_spans(step.calls):
                seconds[span.layer] += span.seconds
                floors[span.layer] += sum(self.ceilings.floor(call.cost) for call in span.calls if call.cost)
        return [Layer(layer, taken, floors[layer]) for layer, taken in seconds.items()]

    @property
    def cost(self) -> Cost:
        """Of everything that is counted."""
        return sum((row.cost for row in self.rows if row.cost is not None), Cost(0))

    @property
    def floor(self) -> float:
        """Of all operations, one after the other."""
        return sum(row.floor for row in self.rows)

    @property
    def in_operations(self) -> float:
        """Seconds of the parts, all added up."""
        return sum(row.seconds for row in self.rows)

    @property
    def between_operations(self) -> float:
        """Seconds inside forward passes that no operation took: the layers' own Python."""
        spans = sum(calls[-1].ended - calls[0].began for step in self.steps for calls in _passes(step.calls))
        return spans - sum(call.seconds for step in self.steps for call in step.calls if call.cost is not None)

    @property
    def around(self) -> float:
        """What remains: scheduler, cache and strategy, and the making of batches."""
        return self.seconds - self.in_operations - self.between_operations


def layer_spans(calls: Iterable[Call]) -> Iterator[Span]:
    """Cut a step into its layers, in the order they ran. What is beside the model belongs to none."""
    for forward in _passes(calls):
        group: list[Call] = []
        for call in forward:
            if group and group[-1].layer != call.layer:
                yield Span(group[0].layer, group)
                group = []
            group.append(call)
        yield Span(group[0].layer, group)


def _passes(calls: Iterable[Call]) -> list[list[Call]]:
    """The forward passes of a step: each begins with an embedding."""
    passes: list[list[Call]] = []
    for call in calls:
        if call.operation == "embed":
            passes.append([])
        if call.cost is not None:
            passes[-1].append(call)
    return passes


@dataclass(frozen=True)
class Profile:
    """A run, watched."""

    steps: list[Step]
    num_layers: int
    ceilings: Ceilings
    """What the floors stand on"""

    @cached_property
    def phases(self) -> dict[PhaseName, Phase]:
        """Those that had a step."""
        names: tuple[PhaseName, ...] = ("prefill", "decode")
        groups = {name: [step for step in self.steps if step.phase == name] for name in names}
        return {name: Phase(steps, self.num_layers, self.ceilings) for name, steps in groups.items() if steps}

    @property
    def overhead(self) -> list[float]:
        """What watching cost, as a share of the plain step: of each step, least first."""
        return sorted(step.seconds / step.plain_seconds - 1 for step in self.steps)

    @property
    def median_overhead(self) -> float:
        """Of all steps."""
        return statistics.median(self.overhead)
