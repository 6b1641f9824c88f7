"""The texts that wait to be embedded or classified by one model.

Texts of requests that wait at the same time are computed together, since one text alone leaves most of a machine idle.
A request whose client has left takes its texts out of the queue.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.async_engine import AsyncEngine
from ..errors import EngineStateError

AT_ONCE = 64
"""Texts that are computed together"""


@dataclass(eq=False)
class _Waiting:
    """A text in the queue."""

    key: Hashable
    compute: Callable[[list[Any]], Sequence[Any]]
    text: Any
    result: "asyncio.Future[Any]"


class TextQueue:
    """The queue of one model, for the tasks of one event loop."""

    def __init__(self, aio: AsyncEngine) -> None:
        self._aio = aio
        self._queue: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None
        self.requests = 0
        """Requests with texts that are not computed yet"""

    async def drain(self) -> None:
        """Wait until the queue is empty and nothing is computed."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def compute(
        self, key: Hashable, compute: Callable[[list[Any]], Sequence[Any]], texts: Sequence[Any]
    ) -> list[Any]:
        """The results of a request's texts, in their order.

        Args:
            key: texts of other requests with an equal one may be computed in the same call
            compute: a result for each text of a list; called in a worker thread
            texts: the request's texts

        Raises:
            EngineStateError: the queue has ended: a server that drained waited long enough.
            Exception: as `compute`.
        """
        loop = asyncio.get_running_loop()
        mine = [_Waiting(key, compute, text, loop.create_future()) for text in texts]
        self._queue.extend(mine)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        self.requests += 1
        try:
            return [await waiting.result for waiting in mine]
        finally:
            self.requests -= 1
            for waiting in mine:  # those that are left, if the request is given up or one of its texts failed
                if not waiting.result.cancel() and not waiting.result.cancelled():
                    waiting.result.exception()  # is seen, or asyncio would report it

    async def _run(self) -> None:
        batch: list[_Waiting] = []
        try:
            while batch := self._take():
                try:
                    results = await self._aio.run(batch[0].compute, [waiting.text for waiting in batch])
                except Exception as error:
                    for waiting in batch:
                        if not waiting.result.done():
                            waiting.result.set_exception(error)
                    continue
                for waiting, result in zip(batch, results, strict=True):
                    if not waiting.result.done():
                        waiting.result.set_result(result)
        finally:
            for waiting in [*batch, *self._queue]:  # only if it is cancelled: draining took too long
                if not waiting.result.done():
                    waiting.result.set_exception(EngineStateError("the engine is closed"))
            self._queue.clear()

    def _take(self) -> list[_Waiting]:
        """The next texts that go together: those with the key of the first, up to `AT_ONCE`."""
        batch: list[_Waiting] = []
        others: list[_Waiting] = []
        while self._queue and len(batch) < AT_ONCE:
            waiting = self._queue.popleft()
            if waiting.result.done():
                continue
            (batch if not batch or waiting.key == batch[0].key else others).append(waiting)
        self._queue.extendleft(reversed(others))
        return batch
