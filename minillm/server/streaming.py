"""Streams of server-sent events, and requests whose client may leave.

Source: the HTML standard, "Server-sent events", as OpenAI's API uses them: a line `data: {JSON}` for each chunk, a
line `data: [DONE]` at the end. A chunk's constant part is encoded once for each stream, its text for each token.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .protocol import ApiError, internal_error

if TYPE_CHECKING:
    from ..decoding.event import Event
    from .exchange import Exchange

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


class AnswerWriter(ABC):
    """The body of one streamed answer, in bytes that are sent as they come."""

    silence = b": keep-alive\n\n"
    """Bytes without effect, sent between others while there is nothing to say: here a comment"""

    def begin(self) -> bytes:
        """Its beginning, sent at once."""
        return b""

    @abstractmethod
    def write(self, prompt: int, event: "Event") -> bytes:
        """The part for an event of the prompt with this index; maybe none."""

    @abstractmethod
    def end(self) -> bytes:
        """Its end, after the last event."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Its end if the request failed."""


class ChunkWriter(AnswerWriter):
    """The chunks of completions or of a chat; what does not change is encoded once."""

    def __init__(self, head: Mapping[str, Any], usage: Callable[[], Any] | None) -> None:
        """Args:
        head: the fields of every chunk before `choices`
        usage: returns the usage, with which the stream then ends; all other chunks then say null
        """
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._tail = b"]}\n\n" if usage is None else b'],"usage":null}\n\n'
        self._usage = usage
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """By the index of a choice: what is before and after its text in a chunk without anything else"""

    def chunk(self, choice: bytes) -> bytes:
        """The chunk of one choice, given as JSON."""
        return self._head + choice + self._tail

    def text_chunk(self, index: int, text: str) -> bytes:
        """The chunk of a text and nothing else, as most are. `index`: of its choice."""
        if index not in self._around:
            before, after = self._text_choice(index).split(b"TEXT")
            self._around[index] = self._head + before, after + self._tail
        before, after = self._around[index]
        return before + encode(text) + after

    @abstractmethod
    def _text_choice(self, index: int) -> bytes:
        """The JSON of such a choice, with TEXT in place of the text."""

    def end(self) -> bytes:
        """The chunk with the usage and no choice, if it is wanted, and the last line."""
        usage = b"" if self._usage is None else self._head + b'],"usage":' + encode(self._usage()) + b"}\n\n"
        return usage + DONE

    def failed(self, error: ApiError) -> bytes:
        """An event with the error, as in OpenAI's API, and the last line."""
        return b"data: " + error.body() + b"\n\n" + DONE


async def until_gone(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    late: Callable[[], bool] = lambda: False,
    every: float | None = None,
) -> T:
    """Run `work`, and cancel it if the client leaves or is late.

    Args:
        receive: of the request, whose body has been read
        work: to run
        late: True if the client does not take what is sent
        every: seconds between two times at which it is asked; None: never

    Raises:
        ClientDisconnect: it has left, or was late.
        Exception: as `work`.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        while not task.done():
            await asyncio.wait({task, gone}, timeout=every, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and (gone.done() or late()):
                raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamResponse(Response):
    """A response of server-sent events, or of other lines, written as they come: what a step brings in one write.

    A failure after the beginning is told by its writer; nothing follows it.
    """

    def __init__(
        self,
        exchange: "Exchange[Any]",
        writer: AnswerWriter,
        *,
        media_type: str = "text/event-stream; charset=utf-8",
    ) -> None:
        """Args:
        exchange: the request, submitted
        writer: of the body
        media_type: of the body
        """
        super().__init__(None, media_type=media_type, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._exchange, self._writer = exchange, writer
        self._arrival: asyncio.Future[None] | None = None
        """The next event, for which the stream waits"""
        self._sent_at = 0.0
        """When the last piece was given to the connection, which may still wait for the client to take others"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; a client that takes nothing for `Limits.send_timeout` seconds, or up to a quarter more, is late.

        Silence of `Limits.keep_alive_interval` seconds ends with a comment.
        """
        limits = self._exchange.limits

        def is_late() -> bool:
            silence = time.monotonic() - self._sent_at
            if self._arrival is None:
                return silence > limits.send_timeout
            if silence >= limits.keep_alive_interval and not self._arrival.done():
                self._arrival.set_result(None)  # the stream finds no event, and says that it is there
            return False

        self._sent_at = time.monotonic()
        work = self._write(send, scope.get("minillm.send", send))
        await until_gone(receive, work, is_late, min(limits.send_timeout / 4, limits.keep_alive_interval / 2))

    async def _write(self, send: Send, send_piece: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        piece, more, exchange, write = self._writer.begin(), True, self._exchange, self._writer.write
        while more:
            if piece:
                self._sent_at = time.monotonic()
                await send_piece({"type": "http.response.body", "body": piece, "more_body": True})
            try:
                events = exchange.take()
                if events is None:  # not `read`: a coroutine for each token
                    self._arrival = exchange.arrival()
                    await self._arrival
                    self._arrival, events = None, exchange.take()
                if events is None:
                    piece = self._silence()
                    continue
                if len(events) == 1:
                    piece = write(*events[0])
                    continue
                more = bool(events)
                piece = b"".join([write(*event) for event in events]) if more else self._writer.end()
            except ApiError as error:
                piece, more = self._writer.failed(error), False
            except Exception as error:
                piece, more = self._writer.failed(internal_error(error)), False
        await send({"type": "http.response.body", "body": piece, "more_body": False})

    def _silence(self) -> bytes:
        """A comment, if nothing was sent for long."""
        return (
            self._writer.silence
            if time.monotonic() - self._sent_at >= self._exchange.limits.keep_alive_interval
            else b""
        )
