"""When each operation of a forward pass ran, and what it cost.

`TimingBackend` notes two moments for each call and keeps what its cost depends on; `take` works the rest out between
two steps, where it delays nothing. Costs are those that `CountingBackend` counts.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ..batch import Batch
from ..ops.cost import Cost
from ..ops.philox import Keys
from .base import Backend
from .counting import CountingBackend
from .weights import Weight
from .wrapping import WrappedBackend

Answer = TypeVar("Answer")


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


class TimingBackend(WrappedBackend):
    """Notes when the operations that go through it begin and end."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._mark = inner.clock.mark
        self._began: Any = None
        self._noted: list[tuple[Any, ...]] = []  # of `_Noted`, which takes longer to make: `take` makes them
        self._counting = CountingBackend(inner)

    def before(self, operation: str) -> None:
        """Note the beginning."""
        self._began = self._mark()

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Note the end."""
        self._noted.append((operation, self.layer, self._began, self._mark(), weight, result, arguments))

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
            for noted in map(_Noted._make, self._noted)
        ]
        self._noted.clear()
        return calls

    def _cost(self, noted: _Noted) -> Cost | None:
        """What a call cost, by the back end that counts."""
        if noted.arguments is None:
            return None
        self._counting.reset()
        self._counting.observe(noted.operation, noted.weight, noted.result, **noted.arguments)
        return self._counting.total

    def _uncounted(self, operation: str, run: Callable[[], Answer]) -> Answer:
        """Run and note what is no part of the model."""
        began = self._mark()
        answer = run()
        self._noted.append((operation, None, began, self._mark(), None, None, None))
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
