"""One request for text on its way: read, checked, queued in the engine, counted, ended.

`ServerRequest.read` > `submit` > `take`, for a stream, or `results`, for a whole answer > `close`. A client that leaves
ends its request.
"""

import asyncio
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from ..decoding.event import Event
from ..decoding.settings import GenerationConfig
from ..decoding.strategy import Request as EngineRequest
from ..decoding.thinking import markers_of
from ..engine.async_engine import AsyncEventStream, has_more, listen, take_any
from ..engine.results import Generation
from ..errors import MinillmError, QueueFullError, listed, shown
from ..text.chat import AnswerParser
from ..text.chat.reasoning import ReasoningParser, Thoughts
from .generation_request import ChatRequest, Endpoint, R, Translated, translate
from .http_json import ApiError, internal_error, new_id
from .limits import queue_full
from .metrics import Phase, RequestMetrics
from .served_model import ServedModel
from .state import Server
from .tools import FirstCalls, ToolUse, tool_use

T = TypeVar("T")


class Usage(Struct, omit_defaults=True):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | None = None
    """"reasoning_tokens" of a model that thinks, markers included"""

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> "Usage":
        """The counts of one answer."""
        return cls(prompt, completion, prompt + completion, {"cached_tokens": cached})

    @property
    def cached_tokens(self) -> int:
        """Tokens of prompts that were found in the prefix cache."""
        return self.prompt_tokens_details["cached_tokens"]

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens that are thoughts."""
        return (self.completion_tokens_details or {}).get("reasoning_tokens", 0)


class ThinkingTokens:
    """Counts the tokens of an answer's thoughts, as its events come."""

    def __init__(self, parser: ReasoningParser) -> None:
        self.count = 0
        """Tokens so far, markers included"""
        self._parser, self._decoder = parser, getincrementaldecoder("utf-8")("replace")

    def see(self, event: Event) -> None:
        """Take an event's tokens."""
        for token in event.token_bytes:
            if self._parser.answering:
                return
            thought = self._parser.thinking
            self._parser.push(self._decoder.decode(token))
            self.count += thought or self._parser.thinking


class ServerRequest(Generic[R]):
    """A request to a model, and its answer."""

    def __init__(self, server: Server, model: ServedModel, asked: Translated[R], prefix: str, http: Request) -> None:
        """Args:
        server: with its limits and counts
        model: answers it
        asked: its fields
        prefix: prefix of the answer's id
        http: the request of HTTP

        Raises:
            ApiError: the model generates no text.
        """
        model.need("/v1/completions", http.scope["path"])
        self.limits = server.limits
        self.model, self.asked = model, asked
        self.prompts: list[list[int]] = []
        self.id = f"{prefix}-{new_id()}"
        self.created = int(time.time())
        self._server, self._http = server, http
        self._arrived = self.seen_at = time.monotonic()
        """When the request came, and when `take` last had events, in seconds of `time.monotonic`"""
        self._streams: list[AsyncEventStream] = []
        self._metrics: list[RequestMetrics] = []
        self._use: ToolUse | None = None
        self._first_calls: FirstCalls | None = None
        self._thoughts: Thoughts | None = None
        """How the answer tells its thoughts; None where it does not"""
        self._thinking: dict[tuple[int, int], ThinkingTokens] = {}
        """By prompt and answer: the tokens of its thoughts"""

    @classmethod
    async def read(cls, http: Request, endpoint: Endpoint[R], prefix: str) -> "ServerRequest[R]":
        """Read a request.

        Args:
            http: the request of HTTP
            endpoint: its fields
            prefix: prefix of the answer's id

        Raises:
            ApiError: its body is no valid request, or names a model that is not here or generates no text.
        """
        server = Server.of(http)
        asked = translate(await server.read_json(http), endpoint)
        return cls(server, await server.take(http, asked.body.model), asked, prefix, http)

    @property
    def body(self) -> R:
        """The fields that the server reads."""
        return self.asked.body

    # --- into the engine ----------------------------------------------------------------------------------------------

    def tool_use(self) -> ToolUse | None:
        """The tools that the request offers its model.

        Raises:
            ApiError: as `tools.tool_use`.
        """
        try:
            use = tool_use(self.asked, self.model)
        except MinillmError as error:
            raise self.asked.error(error) from None
        self._use = use
        return use

    @property
    def reads_answers(self) -> bool:
        """True if an answer has thoughts or calls to be told from its content."""
        return self._use is not None or self._thoughts is not None

    def parser(self) -> AnswerParser:
        """A parser of one answer; of use once the conversation is rendered."""
        reasoning = None if self._thoughts is None else self._thoughts.parser()
        return AnswerParser(reasoning, None if self._use is None else self._use.parser())

    def render(self, use: ToolUse | None) -> list[list[int]]:
        """Token ids of the conversation, the request's only prompt. `use`: the tools that the template is shown.

        Raises:
            MinillmError: it is malformed, too long, or not what the model's template takes.
        """
        text = self.model.render(self.body, None if use is None else use.offered)
        form = self.model.reasoning_format
        if form is not None and getattr(self.body, "reasoning_format", None) not in ("none", "raw"):
            self._thoughts = Thoughts(form, form.opened_by(text))
        return self.model.encode([text], add_special_tokens=False)

    def encoded(self, use: ToolUse | None) -> list[list[int]]:
        """As `render`, for a request that is not submitted.

        Raises:
            ApiError: as `submit`, of the conversation.
        """
        try:
            return self.render(use)
        except MinillmError as error:
            raise self.asked.error(error) from None

    async def submit(self, encode: Callable[[], list[list[int]]], count: int, default: int | None) -> None:
        """Queue the request: a stream of events for each prompt, once all are queued.

        Args:
            encode: returns the token ids of its prompts; called in a worker thread, for it may take milliseconds
            count: number of its prompts
            default: new tokens if the request does not say; None: as many as the context holds

        Raises:
            ApiError: it is refused; then nothing is queued.
        """
        engine, body = self.model.engine, self.body

        def make() -> list[EngineRequest]:
            prompts = encode()
            config = GenerationConfig.from_dict(self._fields(prompts, default))
            requests = engine.requests(
                prompts,
                config,
                priority=body.priority or 0,
                timeout=self.limits.seconds(body.timeout),
                defaults=engine.chat_defaults if isinstance(body, ChatRequest) else None,
                thoughts=self._thoughts,
            )
            limited = {"max_new_tokens", "max_length"} & self.asked.fields.keys() and not self.asked.capped
            return requests if limited else [*map(engine.fitted, requests)]

        metrics = self._server.metrics.model(self.model)
        try:
            self._streams = await self.model.aio.submit_made(make, count, request_id=self.id)
        except QueueFullError as error:
            load, seconds = self.model.aio.load(), metrics.histograms["e2e_request_latency_seconds"].mean
            raise queue_full(str(error), load.waiting, load.running, seconds) from None
        except MinillmError as error:
            raise self.asked.error(error) from None
        self.prompts = [stream.prompt_token_ids for stream in self._streams]
        if self._use is not None and self._use.single:
            self._first_calls = FirstCalls([self.parser() for _ in range(self.asked.n)])
        self._metrics = [RequestMetrics(metrics, len(prompt), self._arrived) for prompt in self.prompts]
        self._http.scope["minillm.request"] = self  # the middleware logs its usage and closes it, however it ends

    def _fields(self, prompts: list[list[int]], default: int | None) -> Mapping[str, Any]:
        """The generation fields, complete; `default` as of `submit`.

        Raises:
            ApiError: a prompt, or a prompt with its new tokens, is too long; or a count is above its limit.
        """
        limits, asked, context = self.limits, self.asked, self.model.engine.context
        longest = max(map(len, prompts))
        if limits.max_prompt_tokens is not None and longest > limits.max_prompt_tokens:
            message = f"the prompt has {longest} tokens: this server allows {limits.max_prompt_tokens}"
            raise ApiError(message, code="context_length_exceeded")
        if self.model.engine.config.encoder_layers:
            longest = 1  # the context is the decoder's, whose text begins with one token
        asked.limit("num_return_sequences", limits.max_n)
        asked.limit("num_beams", limits.max_n)
        asked.limit("top_logprobs", limits.max_logprobs)
        fields = dict(asked.fields)
        fields |= self._processors()
        if asked.capped and isinstance(cap := fields.get("max_new_tokens"), int):
            fields["max_new_tokens"] = min(cap, max(1, context - longest))
        new = fields.get("max_new_tokens", 0 if default is None else min(default, 1))
        if isinstance(new, int) and longest + max(new, 1 - bool(fields.get("echo"))) > context:
            name = asked.names.get("max_new_tokens", "max_tokens")
            more = f" and {name}={new}" if new and "max_new_tokens" in fields and not asked.capped else ""
            raise ApiError(
                f"a prompt of {longest} tokens{more} does not fit into the context of {context}: shorten the prompt"
                + (f", or lower {name}" if more else ""),
                param=name if more else None,
                code="context_length_exceeded",
            )
        if "max_length" not in fields and "max_new_tokens" not in fields:
            room = context - longest
            fields["max_new_tokens"] = room if default is None else min(default, max(1, room))
        if self.body.stop_token_ids and not self.body.ignore_eos:
            own = fields.get("eos_token_id", self._end_ids())
            fields["eos_token_id"] = [*(own if isinstance(own, list | tuple) else [own]), *self.body.stop_token_ids]
            asked.names.setdefault("eos_token_id", "stop_token_ids")
        if self._thoughts is not None and self._thoughts.form.hidden_by(self.model.engine.tokenizer):
            fields["skip_special_tokens"] = False  # its markers are among them
        if "thinking_tokens" not in fields and markers_of(self.model.engine.tokenizer) is None:
            fields.pop("max_thinking_tokens", None)  # a model without thoughts keeps within any budget
        if self.model.lora is not None:
            fields.setdefault("lora", self.model.lora)
        return fields

    def _processors(self) -> dict[str, list[str]]:
        """The generation field of the logits processors that the request asks for, if any.

        Raises:
            ApiError: the server was not started with one of them.
        """
        given, allowed = self.body.logits_processors or [], self.limits.logits_processors
        names = [given] if isinstance(given, str) else given
        for name in names:
            if name not in allowed:
                known = f"it allows {listed(allowed)}" if allowed else "it allows none (--logits-processor NAME)"
                message = f"logits_processors: this server does not allow {shown(name)}: {known}"
                raise ApiError(message, param="logits_processors")
        if names:
            self.asked.names.setdefault("logits_processor", "logits_processors")
        return {"logits_processor": names} if names else {}

    def _end_ids(self) -> tuple[int, ...]:
        """The tokens that end the text, unless the request says others; in a conversation also those that end turns."""
        engine = self.model.engine
        return engine.turn_end_ids if isinstance(self.body, ChatRequest) else engine.eos_token_ids

    # --- out of the engine --------------------------------------------------------------------------------------------

    def take(self) -> list[tuple[int, Event]] | None:
        """The events since the last call, counted, each with its prompt's index. Empty at the end; None: none yet.

        Raises:
            ApiError: the request failed.
        """
        try:
            events = take_any(self._streams, merge=self._first_calls is None)
        except Exception as error:
            for metrics in self._metrics:
                metrics.cut_off("error")
            raise internal_error(error) from None
        if events is None:
            return None
        if self._first_calls is not None:
            events = self._first_calls.until_complete(events)
            if self._first_calls.all_ended:
                for stream in self._streams:
                    stream.close()
            elif not events:
                return None
        now = self.seen_at = time.monotonic()
        for i, event in events:
            self._metrics[i].see(event, now)
        if self._thoughts is not None:
            self._count_thoughts(events, self._thoughts)
        return events

    @property
    def has_more(self) -> bool:
        """Whether `take` now has something to say: events, or their end."""
        return self._first_calls is not None or has_more(self._streams)

    def _count_thoughts(self, events: Sequence[tuple[int, Event]], thoughts: Thoughts) -> None:
        for i, event in events:
            place = (i, event.index)
            if place not in self._thinking:
                self._thinking[place] = ThinkingTokens(thoughts.parser())
            self._thinking[place].see(event)

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have a function called whenever `take` has new events; None: no more."""
        listen(self._streams, listener)

    async def results(self) -> list[Generation]:
        """All results of each prompt, in order.

        Raises:
            ApiError: the request failed.
            ClientDisconnect: the client has left; the request is aborted.
        """
        return await until_gone(self._http.receive, self._results())

    async def _results(self) -> list[Generation]:
        by_prompt: list[list[Event]] = [[] for _ in self.prompts]
        complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def collect() -> None:
            try:
                while events := self.take():
                    for i, event in events:
                        by_prompt[i].append(event)
            except ApiError as error:
                failure: ApiError | None = error
            else:
                if events is None:
                    return
                failure = None
            if not complete.done():  # else it is cancelled
                complete.set_result(None) if failure is None else complete.set_exception(failure)

        self.listen(collect)
        try:
            collect()
            await complete
        finally:
            self.listen(None)
        return [Generation.of(prompt, events) for prompt, events in zip(self.prompts, by_prompt, strict=True)]

    def close(self) -> None:
        """Abort what is not done."""
        for stream, metrics in zip(self._streams, self._metrics, strict=True):
            stream.close()
            metrics.cut_off("abort")

    # --- in every answer ----------------------------------------------------------------------------------------------

    def head(self, kind: str) -> dict[str, Any]:
        """The fields with which an answer, and every chunk of one, begins. `kind` is its "object"."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }

    def usage(self) -> Usage:
        """Tokens so far."""
        usage = Usage.of(
            sum(metrics.prompt_tokens for metrics in self._metrics),
            sum(metrics.generated for metrics in self._metrics),
            sum(metrics.cached for metrics in self._metrics),
        )
        if self._thoughts is not None:
            thinking = sum(tokens.count for tokens in self._thinking.values())
            usage.completion_tokens_details = {"reasoning_tokens": thinking}
        return usage

    def attributes(self) -> Mapping[str, Any]:
        """Model and tokens for `tracing`."""
        usage = self.usage()
        return {
            "gen_ai.request.model": self.body.model or self.model.name,
            "gen_ai.response.model": self.model.name,
            "gen_ai.response.id": self.id,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }

    def phases(self) -> Sequence[Phase]:
        """The times of the first prompt, for `tracing`."""
        return self._metrics[0].phases if self._metrics else ()

    def stop_reason(self, reason: str | int | None) -> str | int | None:
        """The reason of a text's end as vLLM tells it: the stop string or token that the request named, else None."""
        return None if reason is None or reason in self._end_ids() else reason


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T], late: "asyncio.Future[None] | None" = None) -> T:
    """Run `work`, and cancel it if the client leaves or is late.

    Args:
        receive: the request's, whose body has been read
        work: to run
        late: done once the client does not take what is sent; None: it may take its time

    Raises:
        ClientDisconnect: it has left, or was late.
        Exception: as `work`.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        awaited: set[asyncio.Future[Any]] = {task, gone} if late is None else {task, gone, late}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
