"""The events of one request, step by step."""

from collections import deque
from collections.abc import Iterator

from ..decoding.event import Event
from ..decoding.strategy import Request
from ..progress import PROMPT, underway
from .driver import Driver
from .turns import interrupts


class EventStream(Iterator[Event]):
    """Iterator over the events of one request. Each `next` runs steps until there is an event.

    Closing it, or dropping all references to it, aborts the request.

    Example:
        >>> stream = engine.stream("Count from 3 to 9:")
        >>> next(stream).text
        ' 3'
        >>> stream.close()
    """

    request: Request
    """The request whose events these are"""
    _open = False

    def __init__(self, driver: Driver, request: Request) -> None:
        """Use `Engine.stream` instead."""
        self._driver, self.request = driver, request
        self._mail: deque[Event] = deque()
        with interrupts.deferred():
            [self._request_id] = driver.number([request])
            driver.queue([self._request_id], [request], [self._mail.append])
            self._open = True

    def __next__(self) -> Event:
        """The next event.

        Raises:
            StopIteration: the request is done, or the stream closed.
            EngineStateError: the engine was closed before the end.
            Exception: the error that ended the request.
        """
        loop, prompt = self._driver.loop, underway(PROMPT)
        with interrupts.deferred():
            before = loop.stats.steps
            while self._open and not self._mail and self._driver.pump([self._request_id]):
                interrupts.check()
                if prompt is not None and loop.knows(self._request_id):
                    computed, prompt.total = loop.prompt_progress(self._request_id)
                    if computed == prompt.total:  # beam search tells its tokens at the end
                        prompt.note = f"{loop.stats.steps - before:,} steps"
                    prompt.advance(computed - prompt.done)
            if not (self._open and self._mail):
                self.close()
                raise StopIteration
            event = self._mail.popleft()
            if event.error is not None or event.request_finished:
                self.close()
            if event.error is not None:
                raise event.error
            return event

    def close(self) -> None:
        """Abort the request, if it is not done."""
        if self._open:
            self._driver.drop([self._request_id])
            self._open = False

    def __del__(self) -> None:
        if self._open:
            self._driver.abort_soon(self._request_id)
