"""One request on its way: read, translated, queued, counted, answered."""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ..engine.async_engine import AsyncEventStream, arrival, take_any
from ..engine.results import Generation
from ..errors import MinillmError
from .limits import Limits, read_body, retry_after
from .metrics import Watch
from .protocol import ApiError, GenerationRequest, Usage, internal_error, read_json
from .served import Served
from .streaming import encode, until_gone
from .tools import FirstCalls, ToolUse, tool_use
from .translate import Endpoint, Translated, translate

if TYPE_CHECKING:
    from ..decoding.event import Event
    from .app import Server

R = TypeVar("R", bound=GenerationRequest)

LARGE_BODY = 2**16
"""Bytes of a body that is parsed in another thread."""


async def json_of(request: Request, server: "Server") -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        ApiError: as `read_body` and `read_json`.
    """
    body = await read_body(request, server.limits)
    if len(body) < LARGE_BODY:
        return read_json(body)
    return await server.model(None).aio.run(read_json, body)


async def exchange_of(request: Request, endpoint: Endpoint[R], prefix: str) -> "Exchange[R]":
    """Read a request for a text.

    Args:
        request: of HTTP
        endpoint: its fields
        prefix: of the answer's id

    Raises:
        ApiError: its body is no valid request, or names a model that is not here or generates no text.
    """
    server: Server = request.app.state.server
    asked = translate(await json_of(request, server), endpoint)
    return Exchange(server, server.model(asked.request.model), asked, prefix, request)


class Exchange(Generic[R]):
    """A request to a model, and its answer."""

    def __init__(self, server: "Server", served: Served, asked: Translated[R], prefix: str, request: Request) -> None:
        """Raises:
        ApiError: the model generates no text.
        """
        served.need("/v1/completions", request.url.path)
        self.limits: Limits = server.limits
        self.served, self.asked = served, asked
        self.prompts: list[list[int]] = []
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._server, self._http = server, request
        self._arrived = time.monotonic()
        self._streams: list[AsyncEventStream] = []
        self._watches: list[Watch] = []
        self._first_calls: FirstCalls | None = None

    def tool_use(self) -> ToolUse | None:
        """The tools that the request offers its model.

        Raises:
            ApiError: as `tools.tool_use`.
        """
        try:
            use = tool_use(self.asked, self.served)
        except MinillmError as error:
            raise self.asked.error(error) from None
        self._first_calls = FirstCalls(use, self.asked.n) if use is not None and use.single else None
        return use

    def render(self, request: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> list[list[int]]:
        """Token ids of a conversation, the request's only prompt.

        Raises:
            MinillmError: it is malformed, too long, or not what the model's template takes.
        """
        return self.served.encode([self.served.render(request, tools)], add_special_tokens=False)

    async def submit(self, encode: Callable[[], list[list[int]]], count: int, default: int | None) -> None:
        """Queue the request.

        Args:
            encode: returns the token ids of its prompts; called in a worker thread, for it may take milliseconds
            count: of its prompts
            default: new tokens if the request does not say; None: as many as the context holds

        Raises:
            ApiError: it is refused.
        """
        metrics = self._server.metrics.model(self.served)
        try:
            self._streams = await self.served.submit(self.asked, encode, count, self.limits, default, self.id)
        except ApiError as error:
            if error.status == 429:
                load, seconds = self.served.aio.load(), metrics.histograms["e2e_request_latency_seconds"].mean
                error.headers["Retry-After"] = str(retry_after(load.waiting, load.running, seconds))
            raise
        self.prompts = [stream.prompt_token_ids for stream in self._streams]
        self._watches = [Watch(metrics, len(prompt), self._arrived) for prompt in self.prompts]
        self._http.scope["minillm.exchange"] = self  # `app.Front` logs its usage and closes it, however it ends

    async def read(self) -> "list[tuple[int, Event]]":
        """The events since the last call, counted, each with its prompt's index; waits for the first. Empty at the end.

        Raises:
            ApiError: the request failed.
        """
        while (events := self.take()) is None:
            await self.arrival()
        return events

    def arrival(self) -> "asyncio.Future[None]":
        """Done once `take`, which had nothing, should be called again."""
        return arrival(self._streams)

    def take(self) -> "list[tuple[int, Event]] | None":
        """As `read`, without waiting; None: there are none yet.

        Raises:
            ApiError: the request failed.
        """
        try:
            events = take_any(self._streams)
        except Exception as error:
            for watch in self._watches:
                watch.cut_off("error")
            raise internal_error(error) from None
        if events is None:
            return None
        if self._first_calls is not None:
            events = self._first_calls.until_complete(events)
            if self._first_calls.all_ended:
                for stream in self._streams:
                    stream.close()
        now = time.monotonic()
        for i, event in events:
            self._watches[i].see(event, now)
        return events

    async def results(self) -> list[Generation]:
        """All results of each prompt, in order.

        Raises:
            ApiError: the request failed.
            ClientDisconnect: the client has left; the request is aborted.
        """
        return await until_gone(self._http.receive, self._results())

    async def _results(self) -> list[Generation]:
        events: list[list[Event]] = [[] for _ in self.prompts]
        while found := await self.read():
            for i, event in found:
                events[i].append(event)
        return [Generation.of(prompt, found) for prompt, found in zip(self.prompts, events, strict=True)]

    def close(self) -> None:
        """Abort what is not done."""
        for stream, watch in zip(self._streams, self._watches, strict=True):
            stream.close()
            watch.cut_off("abort")

    def usage(self) -> Usage:
        """Tokens so far."""
        watches = self._watches
        return Usage.of(
            sum(watch.prompt_tokens for watch in watches),
            sum(watch.generated for watch in watches),
            sum(watch.cached for watch in watches),
        )

    def stop_reason(self, reason: str | int | None) -> str | int | None:
        """The reason of a text's end as vLLM tells it: the stop string or token that the request named, else None."""
        return None if reason in self.served.ends(self.asked) else reason

    def head(self, kind: str) -> dict[str, Any]:
        """The fields with which an answer, and every chunk of one, begins. `kind` is its "object"."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": self.served.fingerprint,
        }

    def json(self, answer: Any) -> Response:
        """A response."""
        return Response(encode(answer), media_type="application/json")
