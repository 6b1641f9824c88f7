"""Answers that are sent as they come: events of the engine in, bytes out.

Source: the HTML standard, "Server-sent events", as OpenAI's API uses them: a line `data: {JSON}` for each chunk, a
line `data: [DONE]` at the end.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..decoding.event import Event
from .http_json import ApiError, internal_error
from .server_request import ServerRequest, until_gone


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
        super().__init__(None, media_type=media_type, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._request, self._writer = request, writer
        self._arrival: asyncio.Future[None] | None = None
        """The next event, for which the stream waits"""
        self._sent_at = 0.0
        """When the last piece was given to the connection, which may still wait for the client to take others"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; a client that takes nothing for `Limits.send_timeout` seconds, or up to a quarter more, is late.

        Silence of `Limits.keep_alive_interval` seconds ends with a comment.
        """
        limits = self._request.limits

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
        piece, more, request, write = self._writer.begin(), True, self._request, self._writer.write
        while more:
            if piece:
                self._sent_at = time.monotonic()
                await send_piece({"type": "http.response.body", "body": piece, "more_body": True})
            try:
                events = request.take()
                if events is None:  # no coroutine for each token
                    self._arrival = request.arrival()
                    await self._arrival
                    self._arrival, events = None, request.take()
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
            if time.monotonic() - self._sent_at >= self._request.limits.keep_alive_interval
            else b""
        )
