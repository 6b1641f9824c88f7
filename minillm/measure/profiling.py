"""Profiling of a real run: time of each operation, layer and phase, with its roofline floor.

The same requests run twice, with a `TimingBackend` and without, alternating step by step; the difference is the
profiling overhead. Nothing is estimated: parts are summed as measured, and time outside operations is listed
separately.

    profile(engine, [[2, 5, 6]], max_new_tokens=32).phases["decode"].operations
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, NamedTuple

from ..backends.formats import Format
from ..backends.loader import RandomTensor
from ..backends.operations import Backend
from ..backends.storage import Joined, format_of, some_rows
from ..backends.timing import Call, TimingBackend
from ..backends.weights import Weight
from ..cache import PagedCache, new_cache
from ..decoding.prompts import Prompt
from ..decoding.strategy import Request
from ..engine.engine import Engine
from ..engine.loop import StepLoop
from ..engine.scheduler import Limits
from ..errors import ParameterError
from ..progress import showing, work
from ..reference.cost import Cost
from ..runner.runner import Runner
from .accounting.hardware import CHIPS, PROBE_BYTES, Hardware, best_of, probe, read_bandwidth

PhaseName = Literal["prefill", "decode"]
PHASES: tuple[PhaseName, ...] = ("prefill", "decode")
Place = Literal["embedding", "layers", "head", "outside the model"]
PLACES: tuple[Place, ...] = ("embedding", "layers", "head", "outside the model")


# --- the result -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProfiledStep:
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
class ProfiledOperation:
    """All calls of one operation on one weight, summed over layers and steps."""

    place: Place
    name: str
    calls: int
    cost: Cost | None
    """Total cost; None if not counted"""
    seconds: float
    floor: float
    """Sum of the floors of the calls, in seconds; 0 if not counted"""

    @property
    def ratio(self) -> float | None:
        """Measured time over floor. Below 1 data came from the processor's cache and not from memory."""
        return self.seconds / self.floor if self.floor else None


class ProfiledLayer(NamedTuple):
    """One layer over all steps."""

    layer: int | None
    """None: before the first layer; L: after the last"""
    seconds: float
    floor: float


class LayerSpan(NamedTuple):
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


@dataclass(frozen=True)
class Profile:
    """The steps of a run or of one of its phases, split into operations and layers."""

    steps: list[ProfiledStep]
    num_layers: int
    hardware: Hardware
    """Source of the floors"""
    arithmetic: str = "float32"
    """The dtype in which products are computed, whatever the weights' format"""

    @cached_property
    def phases(self) -> "dict[PhaseName, Profile]":
        """The phases that had at least one step."""
        groups = {name: [step for step in self.steps if step.phase == name] for name in PHASES}
        return {name: replace(self, steps=steps) for name, steps in groups.items() if steps}

    @property
    def peak(self) -> float:
        """FLOP/s of the hardware."""
        return self.hardware.rate(self.arithmetic)

    def floor_of(self, call: Call) -> float:
        """Minimum seconds of an operation, unless its data is in the processor's cache; 0 if it is not counted.

        The longer of its memory traffic and its arithmetic: where it is known what the same product takes in the cache
        that, which includes the unpacking of the weights, and else its FLOPs at the peak rate.
        """
        if (cost := call.cost) is None:
            return 0.0
        moved = cost.bytes_read + cost.bytes_written
        if call.cached is None:
            return self.hardware.seconds(cost.flops, moved, self.arithmetic)
        return max(call.cached, moved / self.hardware.bandwidth)

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return sum(step.tokens for step in self.steps)

    @property
    def seconds(self) -> float:
        """Total time of all steps."""
        return sum(step.seconds for step in self.steps)

    @cached_property
    def operations(self) -> list[ProfiledOperation]:
        """One entry for each operation and weight, in the order of the forward pass."""
        groups: dict[tuple[Place, str], list[Call]] = defaultdict(list)
        for step in self.steps:
            for call in step.calls:
                groups[self._place(call), call.name].append(call)
        operations = [self._sum(place, name, calls) for (place, name), calls in groups.items()]
        return sorted(operations, key=lambda operation: PLACES.index(operation.place))

    def _place(self, call: Call) -> Place:
        if call.cost is None:
            return "outside the model"
        if call.layer is None:
            return "embedding"
        return "head" if call.layer == self.num_layers else "layers"

    def _sum(self, place: Place, name: str, calls: list[Call]) -> ProfiledOperation:
        costs = [call.cost for call in calls if call.cost is not None]
        cost = sum(costs, Cost(0)) if costs else None
        seconds, floor = sum(call.seconds for call in calls), sum(map(self.floor_of, calls))
        return ProfiledOperation(place, name, len(calls), cost, seconds, floor)

    @cached_property
    def layers(self) -> list[ProfiledLayer]:
        """One entry per layer, plus the parts before and after the layers."""
        seconds: dict[int | None, float] = defaultdict(float)
        floors: dict[int | None, float] = defaultdict(float)
        for step in self.steps:
            for span in layer_spans(step.calls):
                seconds[span.layer] += span.seconds
                floors[span.layer] += sum(map(self.floor_of, span.calls))
        return [ProfiledLayer(layer, taken, floors[layer]) for layer, taken in seconds.items()]

    @property
    def cost(self) -> Cost:
        """Total cost of all counted operations."""
        return sum((operation.cost for operation in self.operations if operation.cost is not None), Cost(0))

    @property
    def floor(self) -> float:
        """Sum of the floors of all operations, in seconds."""
        return sum(operation.floor for operation in self.operations)

    @property
    def in_operations(self) -> float:
        """Total seconds inside operations."""
        return sum(operation.seconds for operation in self.operations)

    @property
    def between_operations(self) -> float:
        """Seconds inside forward passes but outside operations: the layers' own Python."""
        spans = sum(calls[-1].ended - calls[0].began for step in self.steps for calls in _passes(step.calls))
        return spans - sum(call.seconds for step in self.steps for call in step.calls if call.cost is not None)

    @property
    def around(self) -> float:
        """All other seconds: scheduler, cache, strategy and batch construction."""
        return self.seconds - self.in_operations - self.between_operations

    @property
    def overhead(self) -> list[float]:
        """Profiling overhead of each step relative to the plain step, in ascending order."""
        return sorted(step.seconds / step.plain_seconds - 1 for step in self.steps)

    @property
    def median_overhead(self) -> float:
        """Median overhead of all steps."""
        return statistics.median(self.overhead)


def layer_spans(calls: Iterable[Call]) -> Iterator[LayerSpan]:
    """Split a step's calls into layers, in execution order. Operations outside the model belong to none."""
    for forward in _passes(calls):
        for layer, group in groupby(forward, key=lambda call: call.layer):
            yield LayerSpan(layer, list(group))


def _passes(calls: Iterable[Call]) -> list[list[Call]]:
    """Split a step's calls into forward passes: each begins with an embedding."""
    passes: list[list[Call]] = []
    for call in calls:
        if call.operation == "embed":
            passes.append([])
        if call.cost is not None:
            passes[-1].append(call)
    return passes


# --- the run ----------------------------------------------------------------------------------------------------------


def profile(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    repeat: int = 1,
    hardware: Hardware | None = None,
    cached: "CachedProducts | None" = None,
    progress: bool = True,
    **fields: Any,
) -> Profile:
    """Run prompts as one batch and time their operations.

    Args:
        engine: provides model and backend; its cache and requests are not touched. Where ranks share it, this one is
            timed
        prompts: the batch
        repeat: number of rounds, after one warm-up round
        hardware: source of the floors; by default this machine, which is probed
        cached: source of the floors of products' arithmetic; by default probed if the machine is, else the peak rate
        progress: show a bar on a terminal or in a notebook
        **fields: fields of `GenerationConfig`

    Raises:
        As `Engine.add`.
    """
    requests = [engine.request(prompt, **fields) for prompt in prompts]
    backend, model = engine.runner.backend, engine.runner.model
    if hardware is None:
        hardware, cached = probe_with(backend), cached or CachedProducts(backend)
    watching = TimingBackend(backend, None if cached is None else cached.seconds)
    plain, watched = (_loop(engine.runner, backend, requests) for backend in (backend, watching))
    tokens = sum(len(request.prompt_ids) + request.max_new_tokens - 1 for request in requests)
    steps: list[ProfiledStep] = []
    with showing(progress), work("profiling", (repeat + 1) * tokens, "tokens") as profiling:
        for number in range(repeat + 1):
            for step in _round(plain, watched, watching, requests):
                steps += [step] if number else []
                profiling.advance(step.tokens)
    return Profile(steps, model.config.num_layers, hardware, _arithmetic(backend))


def probe_with(backend: Backend, threads: int | None = None) -> Hardware:
    """Probe this machine; its rates are the better of NumPy's and the backend's.

    A processor may read faster from several places at once, as products of one row do, than from one, as NumPy does.

    Args:
        backend: the backend
        threads: threads that read memory; by default one per core

    Raises:
        ParameterError: the backend computes on a GPU, which cannot be probed.
    """
    if backend.name == "cuda":
        raise ParameterError(f"the probe is of the processor: name the GPU with --hardware, one of {', '.join(CHIPS)}")
    probed, arithmetic = probe(), _arithmetic(backend)
    rate = max(probed.rate(arithmetic), _product_rate(backend))
    bandwidth = probed.bandwidth if threads is None else read_bandwidth(threads)
    return replace(probed, rates={arithmetic: rate}, bandwidth=max(bandwidth, _read_rate(backend)))


def _arithmetic(backend: Backend) -> str:
    """The dtype in which a backend computes products."""
    return backend.memory.activations.name


def _read_rate(backend: Backend, width: int = 2048) -> float:
    """Bytes/s of float32 weights, more than the caches hold, that the backend's product of one row reads."""
    weight = Weight("probe", backend.xp.ones((PROBE_BYTES // (4 * width), width), backend.xp.float32))
    x = backend.xp.ones((1, width), backend.xp.float32)

    def product() -> None:
        backend.enter_layer(0)
        backend.linear(x, weight)

    return PROBE_BYTES / best_of(product)


def _product_rate(backend: Backend, rows: int = 512, width: int = 1536) -> float:
    """FLOP/s of the backend's product [rows, width] x [width, width], with weights in its own format."""
    weight = backend.loader.prepare("probe", [RandomTensor("probe", (width, width), 0, 1.0)])
    x = backend.xp.ones((rows, width), backend.xp.float32)

    def product() -> None:
        backend.enter_layer(0)  # so that every call reuses the same result buffer
        backend.linear(x, weight)

    return 2 * rows * width * width / best_of(product)


class CachedProducts:
    """Seconds that products take with their weights in the processor's cache: of unpacking and multiplying alone.

    For each format, number of inputs and number of rows, products with a part of a weight's outputs are timed once. The
    difference between two parts, of which one is twice as large, is free of what each call costs.
    """

    PART_BYTES = 1 << 20
    """Size of the larger part: it stays in the caches, and gives each thread some of its outputs"""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._of_output: dict[tuple[Format, int, int], float] = {}

    def seconds(self, weight: Weight, rows: int) -> float:
        """Seconds of the product of x [rows, in] with a weight, without its bias."""
        parts = weight.data.parts if isinstance(weight.data, Joined) else (weight.data,)
        seconds: float = sum(part.shape[0] * self._seconds_of_output(part, rows) for part in parts)
        return seconds

    def _seconds_of_output(self, matrix: Any, rows: int) -> float:
        key = format_of(matrix), matrix.shape[1], rows
        if key not in self._of_output:
            outputs, inputs = matrix.shape
            many = max(1, min(outputs, self.PART_BYTES * outputs // matrix.nbytes) // 16 * 16)
            few = many // 2
            x = self._backend.xp.ones((rows, inputs), self._backend.xp.float32)
            longer, shorter = (
                self._time(x, some_rows(matrix, slice(count))) if count else 0.0 for count in (many, few)
            )
            self._of_output[key] = max(0.0, longer - shorter) / (many - few)
        return self._of_output[key]

    def _time(self, x: Any, matrix: Any) -> float:
        weight = Weight("probe", matrix)

        def product() -> None:
            self._backend.enter_layer(0)
            self._backend.linear(x, weight)

        return min(best_of(product) for _ in range(3))


def _loop(runner: Runner, backend: Backend, requests: Sequence[Request]) -> StepLoop:
    """A step loop with its own cache, as large as the requests need."""
    width = pages = 0
    for request in requests:
        strategy = request.strategy
        longest = max(map(len, request.beginnings)) + request.max_new_tokens + strategy.extra_positions
        width += strategy.max_sequences
        pages += strategy.max_sequences * -(-longest // backend.memory.page_size)
        pages += -(-len(request.source_ids or ()) // backend.memory.page_size)
    cache = new_cache(PagedCache, runner.model.config, backend, pages, layers=runner.layers)
    return StepLoop({"target": runner.apart(cache, backend)}, Limits.of(backend.memory, width))


def _round(
    plain: StepLoop, watched: StepLoop, watching: TimingBackend, requests: Sequence[Request]
) -> Iterator[ProfiledStep]:
    """Run both loops to the end, alternating which one goes first in each step."""
    for loop in (plain, watched):
        for request in requests:
            loop.add(request)
    plain_first = True
    while watched.busy:
        before = watched.stats.prefill_tokens, watched.stats.decode_tokens
        plain_seconds = _timed(plain) if plain_first else 0.0
        began, start = time.perf_counter(), watching.clock.mark()
        watched.step_or_raise()
        seconds = time.perf_counter() - began
        calls = watching.take(start)
        plain_seconds = plain_seconds or _timed(plain)
        plain_first = not plain_first
        prompt, new = watched.stats.prefill_tokens - before[0], watched.stats.decode_tokens - before[1]
        yield ProfiledStep("prefill" if prompt else "decode", prompt or new, seconds, plain_seconds, calls)


def _timed(loop: StepLoop) -> float:
    """Seconds of one step."""
    began = time.perf_counter()
    loop.step_or_raise()
    return time.perf_counter() - began
