"""Times each operation of a forward pass on a backend, and gives its cost beside its time.

`TimingBackend` takes two timestamps for each call and keeps the arguments of its cost; `take` computes the rest between
two steps, where it delays nothing. A pass that is replayed records itself when its launches ended.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from ..batch import Batch
from ..reference.cost import Cost
from ..reference.sampling import Draw
from .clock import Moments
from .observe import CountingBackend, WrappedBackend
from .operations import Backend
from .recording import Result
from .weights import Weight


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
    cached: float | None = None
    """Seconds that a product takes with its weights in the processor's cache; None if that is not known"""

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
    sampler: Any

    def __init__(self, inner: Backend, cached: Callable[[Weight, int], float] | None = None) -> None:
        """Wrap a backend; `cached` gives the seconds of a product of some rows with its weight in the cache."""
        super().__init__(inner)
        memory, sampler = inner.memory, inner.sampler
        self._cached = cached
        self._replaying: Replaying | None = None
        if inner.replays and isinstance(memory, Replaying) and memory.tells_moments:
            self._replaying = memory
        self.replays = self._replaying is not None
        self.clock = memory.clock
        self._mark = self.clock.mark
        self.memory = Replaced(memory, upload=self._uncounted("upload", memory.upload), run=self._run)
        choices = {name: getattr(sampler, name) for name in ("to_host", "finite", "argmax", "sample")}
        self.sampler = Replaced(sampler, **{name: self._uncounted(name, call) for name, call in choices.items()})
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
                self._cached(noted.weight, len(noted.result))
                if self._cached and noted.weight is not None and noted.operation == "linear"
                else None,
            )
            for noted in self._all_noted()
        ]
        self._noted.clear()
        return calls

    def _all_noted(self) -> Iterator[_Noted]:
        """All calls, including replayed passes'."""
        for call in self._noted:
            if not isinstance(call, _Replay):
                yield _Noted(*call)
                continue
            began, launches = call.moments.began, 0
            for noted in self._recorded[call.moments.step]:
                ended = call.moments.ended[noted.launches - 1] if noted.launches > launches else began
                arguments = noted.arguments
                if arguments is not None and "batch" in arguments:
                    arguments = arguments | {"batch": call.batch}
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
