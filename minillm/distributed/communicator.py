"""The operations that ranks communicate by, and the count of what they send."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn


class Sent(NamedTuple):
    """Messages and bytes that a rank has sent of one kind."""

    messages: int = 0
    bytes: int = 0


class Traffic:
    """Counts messages by kind: "all-reduce" (of each the bytes that a rank gives), "stage", "step", "logits",
    "attention" and "hooks".
    """

    def __init__(self) -> None:
        self.sent: dict[str, Sent] = {}

    def add(self, kind: str, size: int) -> None:
        """Count one message of `size` bytes."""
        messages, sizes = self.sent.get(kind, Sent())
        self.sent[kind] = Sent(messages + 1, sizes + size)

    def of(self, kind: str) -> Sent:
        """Messages and bytes of one kind."""
        return self.sent.get(kind, Sent())

    def reset(self) -> None:
        """Forget what was sent so far."""
        self.sent.clear()


class Communicator(ABC):
    """Some ranks as one of them sees them. Every rank calls the same operations in the same order."""

    captures = False
    """Whether `all_reduce` only launches on a device's stream"""
    rank: int
    """Number of this rank, from 0"""
    size: int
    """Number of ranks"""
    traffic: Traffic
    """The count of this rank's messages, also through groups of these ranks"""

    def all_reduce(self, x: Any) -> Any:
        """Replace x by its sum over all ranks, and return it; the same numbers on each."""
        if self.size > 1:
            self.traffic.add("all-reduce", x.nbytes)
            self._all_reduce(x)
        return x

    def repeated(self, nbytes: int) -> None:
        """Count an all-reduce that a recorded pass has repeated."""
        self.traffic.add("all-reduce", nbytes)

    def send(self, x: Any, to: int, kind: str) -> None:
        """Send an array, which may be changed afterwards."""
        self.traffic.add(kind, x.nbytes)
        self._send(x, to)

    def tell(self, message: bytes) -> None:
        """Send a message from rank 0 to all others."""
        for to in range(1, self.size):
            self.traffic.add("step", len(message))
            self._tell(message, to)

    @abstractmethod
    def receive(self, out: Any, source: int) -> None:
        """Fill an array with what another rank sends."""

    @abstractmethod
    def listen(self) -> bytes:
        """Wait for the next message from rank 0, for as long as it takes, without using a core."""

    @abstractmethod
    def all_gather(self, value: Any) -> list[Any]:
        """A small object of each rank, in their order, on all of them."""

    @abstractmethod
    def group(self, members: Sequence[int]) -> "Communicator":
        """Some of the ranks, this one among them. All ranks call it, each for its own group; groups do not overlap."""

    @abstractmethod
    def free(self) -> None:
        """Give back what connects the ranks; all of them call it, and nothing else afterwards. May be called twice."""

    @property
    @abstractmethod
    def on_this_machine(self) -> int:
        """Number of these ranks' processes that share this rank's machine."""

    @abstractmethod
    def abort(self, cause: str) -> NoReturn:
        """End all ranks, because this one cannot go on; the cause is told once."""

    @abstractmethod
    def _all_reduce(self, x: Any) -> None: ...

    @abstractmethod
    def _send(self, x: Any, to: int) -> None: ...

    @abstractmethod
    def _tell(self, message: bytes, to: int) -> None: ...
