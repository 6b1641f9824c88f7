"""Ranks as threads of one process: for tests, and to try things without MPI."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from ..errors import FollowedError, RankError
from .communicator import Communicator, Traffic

__all__ = ["run_ranks"]

Result = TypeVar("Result")
POLL_SECONDS = 0.02
"""Interval at which a waiting thread checks whether another one has failed"""


class _World:
    """The state that the threads share."""

    def __init__(self) -> None:
        self.cause: str | None = None
        self.lock = threading.Lock()
        self.queues: defaultdict[Any, queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)

    def queue(self, *key: Any) -> "queue.SimpleQueue[Any]":
        with self.lock:
            return self.queues[key]

    def take(self, *key: Any) -> Any:
        waiting = self.queue(*key)
        while True:
            try:
                return waiting.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self.cause is not None:
                    raise RankError(self.cause) from None


class ThreadCommunicator(Communicator):
    """Threads that hand each other copies of arrays."""

    def __init__(self, world: _World, members: Sequence[int], rank: int, traffic: Traffic) -> None:
        self._world, self._members = world, tuple(members)
        self.rank, self.size, self.traffic = rank, len(members), traffic

    def receive(self, out: Any, source: int) -> None:
        """Fill an array with what another rank sends."""
        sent = self._world.take("array", self._members, source, self.rank)
        assert sent.shape == out.shape and sent.dtype == out.dtype
        out[...] = sent

    def listen(self) -> bytes:
        """The next message from rank 0."""
        message: bytes = self._world.take("message", self._members, 0, self.rank)
        return message

    def all_gather(self, value: Any) -> list[Any]:
        """A small object of each rank, in their order."""
        for to in range(self.size):
            self._world.queue("value", self._members, self.rank, to).put(value)
        return [self._world.take("value", self._members, source, self.rank) for source in range(self.size)]

    def group(self, members: Sequence[int]) -> "ThreadCommunicator":
        """Some of the ranks."""
        own = [self._members[member] for member in members]
        return ThreadCommunicator(self._world, own, own.index(self._members[self.rank]), self.traffic)

    def free(self) -> None:
        """Nothing: threads have no more than queues."""

    @property
    def on_this_machine(self) -> int:
        """One process, whose threads they are."""
        return 1

    def abort(self, cause: str) -> NoReturn:
        """End all ranks: what they wait for raises RankError."""
        self._world.cause = self._world.cause or f"rank {self.rank}: {cause}"
        raise RankError(self._world.cause)

    def _all_reduce(self, x: Any) -> None:
        x[...] = sum(self.all_gather(np.array(x)))  # in the order of the ranks: the same bits on each

    def _send(self, x: Any, to: int) -> None:
        self._world.queue("array", self._members, self.rank, to).put(np.array(x))

    def _tell(self, message: bytes, to: int) -> None:
        self._world.queue("message", self._members, self.rank, to).put(message)


def run_ranks(size: int, call: Callable[[Communicator], Result]) -> list[Result]:
    """Call a function on `size` threads, each a rank with its communicator. Returns their results.

    Raises:
        Exception: the first error of a rank, by time; the others end then. Rank 0's, if they have agreed on it.
    """
    world = _World()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        communicator = ThreadCommunicator(world, range(size), rank, Traffic())
        try:
            results[rank] = call(communicator)
        except BaseException as error:
            errors.append(error)
            if not isinstance(error, FollowedError):  # which all ranks raise
                world.cause = world.cause or f"rank {rank}: {error}"

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, FollowedError)), errors[0])
    return results
