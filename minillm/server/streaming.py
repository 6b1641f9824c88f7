"""Answers that are sent as they come: events of the engine in, bytes out.

Source: the HTML standard, "Server-sent events", as OpenAI's API uses them: a line `data: {JSON}` for each chunk, a
line `data: [DONE]` at the end.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..decoding.event import Event
from .http_json import ApiError, internal_error
from .server_request import ServerRequest, until_gone

UVICORN_EXCHANGE: tuple[type[Any], ...] = ()
"""uvicorn's class for a request and its answer, where httptools reads; else none"""
with suppress(ImportError):
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    UVICORN_EXCHANGE = (RequestResponseCycle,)


UVICORN_PARTS = ("chunked_encoding", "disconnected", "flow", "transport")
"""Attributes of that class that are used here"""


STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Neither caches nor proxies may collect a stream"""


class AnswerWriter(ABC):
    """The body of one streamed answer, in bytes that are sent as they come."""

    silence = b": keep-alive\n\n"
    """Bytes without effect, sent between others while there is nothing to say: here a comment"""

    def begin(self) -> bytes:
        """Its beginning, sent at once."""
        return b""

    @abstractmethod
    def write(self, prompt: int, event: Event) -> bytes:
        """The part for an event of the prompt with this index; maybe none."""

    @abstractmethod
    def end(self) -> bytes:
        """Its end, after the last event."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Its end if the request failed."""


class StreamResponse(Response):
    """A response of server-sent events, or of other lines, written as they come: what a step brings in one write.

    A failure after the beginning is told by its writer; nothing follows it.
    """

    def __init__(
        self,
        request: ServerRequest[Any],
        writer: AnswerWriter,
        *,
        media_type: str = "text/event-stream; charset=utf-8",
    ) -> None:
        """Args:
        request: submitted
        writer: writes the body
        media_type: the body's
        """
        self.status_code, self.background = 200, None
        self.raw_headers = [(b"content-type", media_type.encode("latin-1")), *STREAM_HEADERS]
        self._request, self._writer = request, writer
        self._handed: asyncio.Future[tuple[bytes, bool]] | None = None
        """While the stream waits for events: takes a piece that its task should send, and whether more follow"""
        self._sent_at = 0.0
        """When the last piece was given to the connection, which may still wait for the client to take others"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; a client that takes nothing for `Limits.send_timeout` seconds, or up to a quarter more, is late.

        Silence of `Limits.keep_alive_interval` seconds ends with a comment.
        """
        limits, loop = self._request.limits, asyncio.get_running_loop()
        late, every = loop.create_future(), min(limits.send_timeout / 4, limits.keep_alive_interval / 2)

        def watch() -> None:
            self._timer = loop.call_later(every, watch)
            silence = time.monotonic() - self._sent_at
            if self._handed is None:
                if silence > limits.send_timeout and not late.done():
                    late.set_result(None)
            elif silence >= limits.keep_alive_interval and not self._handed.done():
                self._handed.set_result((self._writer.silence, True))

        self._sent_at = time.monotonic()
        self._timer = loop.call_later(every, watch)
        try:
            await until_gone(receive, self._write(send, scope.get("minillm.send", send)), late)
        finally:
            self._timer.cancel()
            self._request.listen(None)

    async def _write(self, send: Send, send_piece: Send) -> None:
        """Send the pieces for which a task is needed: the first, the last, and those that wait for the client."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._exchange = exchange_of(send_piece)
        self._request.listen(self._forward)
        piece, more = self._writer.begin(), True
        while more:
            if piece:
                self._sent_at = time.monotonic()
                await send_piece({"type": "http.response.body", "body": piece, "more_body": True})
            self._handed = asyncio.get_running_loop().create_future()
            self._forward()
            piece, more = await self._handed
            self._handed = None
        await send({"type": "http.response.body", "body": piece, "more_body": False})

    def _forward(self) -> None:
        """Send the events that have come, without a task; hand over to the task the end, and what has to wait."""
        handed, exchange, request = self._handed, self._exchange, self._request
        if handed is None or handed.done():
            return
        write = self._writer.write
        try:
            while events := request.take():
                piece = write(*events[0]) if len(events) == 1 else b"".join([write(*event) for event in events])
                if not piece:
                    continue
                if exchange is None or exchange.flow.write_paused or exchange.disconnected:
                    handed.set_result((piece, True))
                    return
                self._sent_at = request.seen_at
                exchange.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))  # as uvicorn's `send`
                if not request.has_more:
                    return
            if events is not None:
                handed.set_result((self._writer.end(), False))
        except ApiError as error:
            handed.set_result((self._writer.failed(error), False))
        except Exception as error:
            handed.set_result((self._writer.failed(internal_error(error)), False))


def exchange_of(send: Send) -> Any:
    """uvicorn's side of a request whose answer goes in chunks, which may be written straight to its transport.

    `send` writes the same, but takes twice as long as the system's call. None: the server is another, reads by h11, or
    is a release of uvicorn whose class has other parts.
    """
    exchange = getattr(send, "__self__", None)
    if not isinstance(exchange, UVICORN_EXCHANGE) or not all(hasattr(exchange, part) for part in UVICORN_PARTS):
        return None
    return exchange if exchange.chunked_encoding else None
