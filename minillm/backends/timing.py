"""When each operation of a forward pass ran, and what it cost.

`TimingBackend` notes two moments for each call and keeps what its cost depends on; `take` works the rest out between
two steps, where it delays nothing. A pass that is replayed tells itself when its launches ended. Costs are those that
`CountingBackend` counts.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

from ..batch import Batch
from ..reference.cost import Cost
from ..reference.philox import Keys
from ..reference.sampling import Draw
from .base import Backend, Result
from .clock import Moments
from .counting import CountingBackend
from .weights import Weight
from .wrapping import WrappedBackend

Answer = TypeVar("Answer")


@runtime_checkable
class Replaying(Protocol):
    """A backend that replays passes, and can tell when the launches of one ended."""

    tells_moments: bool
    """Whether it can here"""

    def run_watched(
        self, owner: object, batch: Batch, rows: Any, compute: Callable[[Batch, Any], Result]
    ) -> tuple[Result, Moments | None]:
        """As `Backend.run`; and of a pass that was recorded or replayed, the moments."""

    def recorded_so_far(self) -> int:
        """Launches of the pass that is recorded now; 0 where none is."""


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
    """None for what is not counted: the check of logits and the choice of tokens, and what goes to a device or back"""

    @property
    def name(self) -> str:
        """Operation and weight: "linear fc1"."""
        return f"{self.operation} {self.weight}".rstrip()

    @property
    def ended(self) -> float:
        """Seconds since the mark that `take` is given."""
        return self.began + self.seconds


class _Noted(NamedTuple):
    """A call as it was noted, to be worked out later."""

    operation: str
    layer: int | None
    began: Any
    ended: Any
    weight: Weight | None = None
    result: Any = None
    arguments: dict[str, Any] | None = None
    """What the cost depends on; None where it is not counted"""
    launches: int = 0
    """Of a pass that was recorded, how many there were when it had ended"""


class _Replay(NamedTuple):
    """A pass that was replayed."""

    batch: Batch
    moments: Moments


class _Owner:
    """In whose name a pass is recorded while it is watched."""


class TimingBackend(WrappedBackend):
    """Notes when the operations that go through it begin and end.

    Of a pass that the wrapped backend replays it knows the operations from when that was recorded, in its own name,
    and when each of its launches ended.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._mark = inner.clock.mark
        self._began: Any = None
        self._noted: list[Any] = []  # of `_Replay`, and of `_Noted` in tuples: `take` makes them, which takes longer
        self._counting = CountingBackend(inner)
        self._replaying = inner if isinstance(inner, Replaying) and inner.tells_moments else None
        self._owners: WeakKeyDictionary[object, _Owner] = WeakKeyDictionary()
        self._recorded: WeakKeyDictionary[object, list[_Noted]] = WeakKeyDictionary()

    def run(
        self,
        owner: object,
        batch: Batch,
        rows: Any,
        compute: Callable[[Batch, Any], Result],
        draws: Sequence[Draw | None] = (),
    ) -> Result:
        """Every operation is called, but for passes that the wrapped one replays and can tell about."""
        if self._replaying is None:
            return super().run(owner, batch, rows, compute)
        first = len(self._noted)
        result, moments = self._replaying.run_watched(self._owners.setdefault(owner, _Owner()), batch, rows, compute)
        if moments is not None and moments.ended is None:
            self._recorded[moments.step] = [_Noted(*noted) for noted in self._noted[first:]]
        elif moments is not None:
            self._noted.append(_Replay(batch, moments))
        return result

    def before(self, operation: str) -> None:
        """Note the beginning."""
        self._began = self._mark()

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Note the end."""
        launches = 0 if self._replaying is None else self._replaying.recorded_so_far()
        self._noted.append((operation, self.layer, self._began, self._mark(), weight, result, arguments, launches))

    def take(self, start: Any) -> list[Call]:
        """All calls since the last `take`, their moments counted from the mark `start`."""
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
        """All calls, those of replayed passes among them."""
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
        """What a call cost, by the backend that counts."""
        if noted.arguments is None:
            return None
        self._counting.reset()
        self._counting.observe(noted.operation, noted.weight, noted.result, **noted.arguments)
        return self._counting.total

    def _uncounted(self, operation: str, run: Callable[[], Answer]) -> Answer:
        """Run and note what is no part of the model."""
        began = self._mark()
        answer = run()
        self._noted.append((operation, None, began, self._mark()))
        return answer

    def upload(self, batch: Batch, rows: Any) -> tuple[Batch, Any]:
        """As the wrapped one."""
        return self._uncounted("upload", lambda: self.inner.upload(batch, rows))

    def to_host(self, array: Any) -> Any:
        """As the wrapped one."""
        return self._uncounted("to_host", lambda: self.inner.to_host(array))

    def finite(self, logits: Any) -> bool:
        """As the wrapped one."""
        return self._uncounted("finite", lambda: self.inner.finite(logits))

    def argmax(self, logits: Any) -> Any:
        """As the wrapped one."""
        return self._uncounted("argmax", lambda: self.inner.argmax(logits))

    def sample(self, logits: Any, keys: Keys, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
        """As the wrapped one."""
        filters: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        return self._uncounted("sample", lambda: self.inner.sample(logits, keys, **filters))
