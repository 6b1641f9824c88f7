"""A load client for `serve.py`: streamed completions over asyncio, and the time at which each piece of text came.

HTTP is parsed by httptools and JSON by msgspec, so that the client, which shares the server's cores, takes little of
them. Each request has a connection of its own, as different users have.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec


@dataclass
class Answer:
    """One request and what came back. Times are those of `time.perf_counter`."""

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """When text came; several pieces in one packet count once"""
    ended: float = 0.0
    asked: int = 0
    """Tokens that it should have"""
    tokens: int = 0
    """Generated, by the server's `usage`"""
    prompt_tokens: int = 0
    error: str = ""
    """Why it failed; empty if it did not"""

    @property
    def first(self) -> float:
        """Seconds to the first text (TTFT)."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between arrivals of text (inter-token latency)."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str | None = None


class _Chunk(msgspec.Struct):
    """The fields of a chunk of /v1/completions that are read."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


class Exchange(asyncio.Protocol):
    """Sends one request, and notes the time of each server-sent event of its answer."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._unread = b""
        self._now = 0.0
        self.answer = Answer()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        self._transport = transport
        self.answer.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Parse what came; the parser calls the methods below."""
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError) as error:
            self.end(f"not understood: {error}")

    def on_body(self, body: bytes) -> None:
        """Read the events that are complete."""
        if self._parser.get_status_code() != 200:
            self._unread += body
            return
        *events, self._unread = (self._unread + body).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                self._read(_decoder.decode(event[6:]))

    def _read(self, chunk: _Chunk) -> None:
        answer = self.answer
        if chunk.error:
            self.end(str(chunk.error))
        if any(choice.text for choice in chunk.choices) and (not answer.arrivals or answer.arrivals[-1] < self._now):
            answer.arrivals.append(self._now)
        if chunk.usage is not None:
            answer.tokens, answer.prompt_tokens = chunk.usage.completion_tokens, chunk.usage.prompt_tokens

    def on_message_complete(self) -> None:
        """End of the answer."""
        status = self._parser.get_status_code()
        self.end("" if status == 200 else f"status {status}: {self._unread.decode(errors='replace')[:200]}")

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is closed: by the server early, unless the answer has ended."""
        self.end(f"the connection was closed early: {error or 'no reason given'}")
        self.closed.set_result(None)

    def end(self, error: str) -> None:
        """End the exchange, unless it has ended, with an error or (empty) without."""
        if not self.answer.ended:
            self.answer.error, self.answer.ended = error, time.perf_counter()
            self._transport.close()


async def complete(port: int, fields: dict[str, Any], limit: float = math.inf) -> Answer:
    """Send fields to /v1/completions on this machine, and read the streamed answer to its end.

    An answer that is not complete at `limit`, in the event loop's time, is given up.
    """
    body = msgspec.json.encode(fields)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    try:
        _, exchange = await loop.create_connection(lambda: Exchange(head.encode() + body), "127.0.0.1", port)
    except OSError as error:
        now = time.perf_counter()
        return Answer(sent=now, ended=now, error=f"no connection: {error}")
    exchange.answer.asked = fields.get("max_tokens", 0)
    await asyncio.wait([exchange.closed], timeout=None if limit == math.inf else limit - loop.time())
    if not exchange.closed.done():
        exchange.end("not answered in time")
        await exchange.closed
    return exchange.answer


async def closed_loop(port: int, requests: Iterable[dict[str, Any]], streams: int, limit: float) -> list[Answer]:
    """Each of so many streams sends its next request as soon as its last one was answered.

    After `limit` seconds what runs is given up, and nothing more is sent.
    """
    remaining, loop = iter(requests), asyncio.get_running_loop()
    end = loop.time() + limit

    async def stream() -> list[Answer]:
        return [await complete(port, fields, end) for fields in remaining if loop.time() < end]

    answers = await asyncio.gather(*(stream() for _ in range(streams)))
    return [answer for part in answers for answer in part]


async def open_loop(
    port: int, requests: Sequence[dict[str, Any]], delays: Sequence[float], limit: float
) -> list[Answer]:
    """Each request is sent some seconds after the one before it, whether or not that one was answered.

    What is not answered `limit` seconds after the first was due is given up.
    """
    loop = asyncio.get_running_loop()
    due, running = loop.time(), []
    end = due + limit
    for fields, delay in zip(requests, delays, strict=True):
        due += delay
        await asyncio.sleep(due - loop.time())
        running.append(asyncio.create_task(complete(port, fields, end)))
    return await asyncio.gather(*running)
