"""Requests that generate nothing: texts as vectors, labels or scores. Read, computed, counted, answered."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct
from starlette.requests import Request

from ..decoding.foreign import API, ignored
from ..errors import EngineStateError, MinillmError, UsageError
from ..tasks.late_interaction import Role
from ..text.tokenizer import EncodedText
from .generation_request import convert
from .http_json import ApiError, internal_error, new_id, shutting_down
from .limits import queue_full
from .served_model import ServedModel
from .server_request import Usage, until_gone
from .state import Server
from .text_queue import AT_ONCE

S = TypeVar("S", bound="TextsRequest")
T = TypeVar("T")

SHORT = 2000
"""Characters of texts that are tokenised at once: handing them to another thread would take longer."""


class TextsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that all of these requests have."""

    model: str | None = None
    user: str | None = None
    """A label for the operator; it never changes an answer"""
    truncate_prompt_tokens: int | None = None
    """vLLM: -1 cuts texts that are too long to as many tokens as the model reads. By default they are refused"""


class TextsServerRequest:
    """A request to a model, and its answer; `RequestMiddleware` logs its usage and closes it, however it ends."""

    def __init__(self, server: Server, model: ServedModel, prefix: str, http: Request) -> None:
        """Args:
        server: with its limits and counts
        model: computes the answer
        prefix: prefix of the answer's id
        http: the request of HTTP
        """
        self.model, self.limits = model, server.limits
        self.id, self.created = f"{prefix}-{new_id()}", int(time.time())
        self.prompt_tokens = 0
        self._server, self._http, self._arrived = server, http, time.monotonic()
        self._reason: str | None = None

    async def encode(
        self,
        texts: Sequence[Any],
        asked: TextsRequest,
        param: str,
        count: int | None = None,
        role: Role | None = None,
    ) -> list[EncodedText]:
        """The tokens of a request's texts, which are counted.

        Args:
            texts: texts, pairs of texts or token ids
            asked: the request
            param: the field that they are from
            count: how many of them the limit counts; None: all
            role: what they are to a late-interaction model

        Raises:
            ApiError: there are too many, one is too long or empty, too many wait, or the server is draining.
        """
        limits, most = self.limits, self.model.max_waiting
        if self._server.draining:
            raise shutting_down("the engine is draining: it takes no new requests")
        count = len(texts) if count is None else count
        if count > limits.max_prompts:
            message = f"{param}: {count} texts, and this server allows {limits.max_prompts}"
            raise ApiError(message, param=param)
        if asked.truncate_prompt_tokens not in (None, -1):
            message = f"truncate_prompt_tokens={asked.truncate_prompt_tokens}: expected -1, or nothing"
            raise ApiError(message, param="truncate_prompt_tokens")
        truncate = asked.truncate_prompt_tokens is not None
        encode = partial(self.model.engine.encode, texts, truncate=truncate, role=role)
        try:
            encoded = encode() if sum(map(_length, texts)) <= SHORT else await self.model.aio.run(encode)
        except MinillmError as error:
            code = "context_length_exceeded" if "tokens" in str(error) else None
            raise ApiError(f"{param}: {error}", param=param, code=code) from None
        longest = max(len(text.token_ids) for text in encoded)
        if limits.max_prompt_tokens is not None and longest > limits.max_prompt_tokens:
            message = f"{param}: a text has {longest} tokens, and this server allows {limits.max_prompt_tokens}"
            raise ApiError(message, param=param, code="context_length_exceeded")
        if (waiting := self.model.queue.requests) >= most:
            seconds = self._server.metrics.model(self.model).histograms["e2e_request_latency_seconds"].mean
            message = f"{waiting} requests wait, and the queue takes {most}: try again later"
            raise queue_full(message, waiting, AT_ONCE, seconds)
        self.prompt_tokens += sum(len(text.token_ids) for text in encoded)
        self._http.scope["minillm.request"] = self
        return encoded

    async def compute(
        self, key: Hashable, compute: Callable[[list[Any]], Sequence[Any]], texts: Sequence[Any]
    ) -> list[Any]:
        """Results of texts; as `TextQueue.compute`.

        Raises:
            ApiError: it failed, or took longer than a request may.
            ClientDisconnect: the client has left.
        """
        work = self.model.queue.compute(key, compute, texts)
        return await self.result_of(work, lambda message: "dimensions" if message.startswith("dimensions") else None)

    async def result_of(self, work: Coroutine[Any, Any, T], blamed: Callable[[str], str | None]) -> T:
        """The result of what is computed for the request, within its time, and how it ended.

        Args:
            work: computes it
            blamed: the field that the message of a mistake is about, or None

        Raises:
            ApiError: it failed, or took longer than a request may.
            ClientDisconnect: the client has left.
        """
        try:
            async with asyncio.timeout(self.limits.request_timeout):
                result = await until_gone(self._http.receive, work)
        except TimeoutError:
            self._reason = "timeout"
            message = f"the answer took more than {self.limits.request_timeout:g} seconds"
            raise ApiError(message, status=504, type="server_error", code="request_timeout") from None
        except EngineStateError as error:
            self._reason = "abort"
            raise shutting_down(str(error)) from None
        except UsageError as error:
            self._reason = "error"
            raise ApiError(str(error), param=blamed(str(error))) from None
        except MinillmError as error:
            self._reason = "error"
            raise internal_error(error) from None
        self._reason = "stop"
        return result

    def close(self) -> None:
        """Count the request's end."""
        metrics = self._server.metrics.model(self.model)
        metrics.finished[self._reason or "abort"] += 1
        metrics.counters["prompt_tokens"] += self.prompt_tokens
        if self._reason == "stop":
            metrics.histograms["e2e_request_latency_seconds"].observe(time.monotonic() - self._arrived)
            metrics.histograms["request_prompt_tokens"].observe(self.prompt_tokens)

    def attributes(self) -> Mapping[str, Any]:
        """Model and tokens for `tracing`."""
        return {"gen_ai.response.model": self.model.name, "gen_ai.usage.input_tokens": self.prompt_tokens}

    def usage(self) -> Usage:
        """Tokens of the texts."""
        return Usage.of(self.prompt_tokens, 0, 0)


async def read_request(http: Request, kind: type[S], prefix: str, endpoint: str) -> tuple[S, TextsServerRequest]:
    """Read a request.

    Args:
        http: the request of HTTP
        kind: its fields
        prefix: prefix of the answer's id
        endpoint: its path, which the model must have

    Raises:
        ApiError: its body is no valid request, or names a model that is not here or has no such endpoint.
    """
    server = Server.of(http)
    body = await server.read_json(http)
    keep_alive = body.get("keep_alive")  # Ollama's
    body = {name: value for name, value in body.items() if value is not None and name not in ignored(API)}
    asked = convert(body, kind)
    model = await server.take(http, asked.model)
    model.need(endpoint, http.url.path)
    server.set_keep_alive(model, keep_alive)
    return asked, TextsServerRequest(server, model, prefix, http)


def listed_texts(value: Any, param: str) -> list[str | list[int]]:
    """The members of a field that is a text, token ids, or a list of either.

    Raises:
        ApiError: it is of another form.
    """
    single = isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(_is_id, value)))
    texts = [value] if single else value
    alike = isinstance(texts, list) and (
        all(isinstance(text, str) for text in texts)
        or all(isinstance(text, list) and bool(text) and all(map(_is_id, text)) for text in texts)
    )
    if not (alike and texts):
        expected = "a text, a list of texts, a list of token ids, or a list of such lists; none of the lists empty"
        raise ApiError(f"{param}: expected {expected}", param=param)
    return texts


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _length(text: Any) -> int:
    """Characters or token ids of a text or a pair."""
    return sum(map(len, text)) if isinstance(text, tuple) else len(text)
