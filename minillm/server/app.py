"""The application: routes, errors in OpenAI's shape, one line of log for each request, drain and close."""

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..decoding.resolving import chat_sampling
from ..engine.async_engine import AsyncEngine
from ..engine.engine import Engine
from ..errors import listed, printable, shown
from ..text.chat import FORMATS, CallFormat
from . import ollama
from .chat import chat_completions
from .completions import completions
from .embeddings import embeddings
from .exchange import Exchange
from .inspection import inspection_routes
from .limits import Limits, check_key
from .metrics import Metrics
from .page import page_routes
from .protocol import ApiError, ModelCard, ModelList
from .relevance import classify, rerank, score
from .responses import responses
from .served import Served, server_defaults
from .streaming import encode
from .texts import TextsExchange
from .tokens import detokenize, tokenize, tokenizer_info

logger = logging.getLogger("minillm.server")
access = logging.getLogger("minillm.access")
PROBES = ("/health", "/metrics")
"""Paths that machines ask every few seconds; their answers are logged at the level of debugging unless they fail"""

CLIENT_LEFT = 499
"""nginx's status in a log, for an answer that nobody waited for."""
REQUEST_ID = re.compile(rb"[!-~]{1,128}")

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class Server:
    """State that the endpoints share: the models, limits and counts, and whether requests are still taken."""

    def __init__(self, models: Mapping[str, Served], limits: Limits) -> None:
        self.models, self.limits = dict(models), limits
        self.metrics = Metrics(self.bases)
        self.draining = False
        self.looking_inside = asyncio.Lock()
        """Held by the one request that computes attention"""

    def bases(self) -> Iterable[Served]:
        """The models without their adapters: one for each engine."""
        return list({id(served.aio): served for served in reversed(self.models.values())}.values())

    def model(self, name: str | None) -> Served:
        """The model of a request; the first if it names none. Ollama's clients add ":latest" to a name without a tag.

        Raises:
            ApiError: there is none of this name.
        """
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            name = name.removesuffix(":latest")
        if name not in self.models:
            message = f"the model {shown(name)} does not exist; there is {listed(self.models)}"
            raise ApiError(message, status=404, param="model", code="model_not_found")
        return self.models[name]

    async def drain(self, timeout: float | None = None) -> None:
        """Refuse new requests, and wait for those that run; after `timeout` seconds they end."""
        self.draining = True
        texts = asyncio.gather(*(served.queue.drain() for served in self.bases()))
        await asyncio.gather(*(served.aio.drain(timeout) for served in self.bases()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(texts, timeout)

    async def close(self) -> None:
        """Abort all requests and close the engines."""
        self.draining = True
        await asyncio.gather(*(served.aio.close() for served in self.bases()))


def make_app(
    engines: Mapping[str, Engine | AsyncEngine] | Engine | AsyncEngine,
    *,
    limits: Limits | None = None,
    max_waiting: int = 1024,
    sampling: Literal["openai", "checkpoint"] = "openai",
    keys: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    tool_parser: str | None = None,
    routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """The application, for uvicorn or another ASGI server. It closes the engines when it ends.

    Args:
        engines: by the names of the models in requests; one alone is called "minillm". The first is the default. LoRA
            adapters of an engine are models under their own names
        limits: of a request
        max_waiting: requests that may wait in each engine's queue; further ones get status 429
        sampling: where the defaults of temperature, top_p etc. come from: OpenAI's API, or a checkpoint's
            generation_config.json, as far as it has them
        keys: API keys, one of which a request needs; none: open to all
        cors_origins: sites whose pages may use the server in a browser; "*" for all
        tool_parser: format of tool calls, one of `minillm.text.chat.FORMATS`; by default that of each model's template
        routes: further ones
    """
    named = engines if isinstance(engines, Mapping) else {"minillm": engines}
    form = None if tool_parser is None else FORMATS[tool_parser]
    server = Server(_served(named, max_waiting, sampling, form), limits or Limits())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await server.close()

    middleware = [Middleware(Front, server=server, keys=keys)]
    if cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients in a browser send headers of their own, as OpenAI's x-stainless-lang
            expose_headers=["X-Request-Id", "Retry-After"],
        )
        middleware.insert(0, cors)
    app = Application(
        routes=[*_routes(), *routes],
        middleware=middleware,
        exception_handlers={HTTPException: _http_error, ApiError: _api_error},
        lifespan=lifespan,
    )
    app.state.server = server
    return app


def _served(
    engines: Mapping[str, Engine | AsyncEngine],
    max_waiting: int,
    sampling: Literal["openai", "checkpoint"],
    form: CallFormat | None,
) -> dict[str, Served]:
    models: dict[str, Served] = {}
    for name, engine in engines.items():
        aio = engine if isinstance(engine, AsyncEngine) else AsyncEngine(engine, max_waiting=max_waiting)
        own = chat_sampling(aio.engine.generation_defaults)
        aio.engine.generation_defaults = server_defaults(aio.engine.generation_defaults, sampling)
        make = partial(Served, aio=aio, tool_parser=form, max_waiting=max_waiting, chat_sampling=own)
        models[name] = base = make(name)
        for adapter in aio.engine.adapters:
            tuned = make(adapter, parent=name, lora=adapter)
            tuned.queue = base.queue
            models.setdefault(adapter, tuned)
    return models


# --- endpoints --------------------------------------------------------------------------------------------------------


def _routes() -> list[BaseRoute]:
    return [
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        *ollama.routes(),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/classify", classify, methods=["POST"]),
        *(Route(f"{version}/score", score, methods=["POST"]) for version in ("", "/v1")),
        *(Route(f"{version}/rerank", rerank, methods=["POST"]) for version in ("", "/v1", "/v2")),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info),
        Route("/health", health),
        Route("/version", version),
        Route("/metrics", metrics),
        *inspection_routes(),
        *page_routes(),
    ]


async def models(request: Request) -> Response:
    """Answer GET /v1/models."""
    server: Server = request.app.state.server
    return _json(ModelList([_card(served) for served in server.models.values()]))


async def model(request: Request) -> Response:
    """Answer GET /v1/models/{id}."""
    server: Server = request.app.state.server
    return _json(_card(server.model(request.path_params["model"])))


async def health(request: Request) -> Response:
    """Answer GET /health: whether new requests are taken."""
    draining = request.app.state.server.draining
    return JSONResponse({"status": "draining" if draining else "ok"}, status_code=503 if draining else 200)


async def version(request: Request) -> Response:
    """Answer GET /version."""
    return JSONResponse({"version": __version__})


async def metrics(request: Request) -> Response:
    """Answer GET /metrics."""
    server: Server = request.app.state.server
    return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _card(served: Served) -> ModelCard:
    return ModelCard(
        id=served.name,
        created=served.created,
        root=served.root,
        parent=served.parent,
        max_model_len=served.engine.context,
    )


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


# --- errors, and what happens to every request ------------------------------------------------------------------------


def _refusal(error: ApiError, path: str) -> Response:
    if path.startswith("/api/"):
        return ollama.refusal(error)
    return Response(error.body(), error.status, error.headers, "application/json")


async def _api_error(request: Request, error: Exception) -> Response:  # async: starlette runs others in threads
    assert isinstance(error, ApiError)
    return _refusal(error, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    """An unknown path or a wrong method, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    path, method = shown(request.url.path), shown(request.method)
    if error.status_code == 404:
        found = ApiError(f"there is nothing at {path}", status=404, code="not_found")
    elif error.status_code == 405:
        allowed = dict(error.headers or {}).get("Allow", "others")
        found = ApiError(f"{path} does not take {method}: it takes {allowed}", status=405, code="method_not_allowed")
    else:
        found = ApiError(str(error.detail), status=error.status_code)
    found.headers |= dict(error.headers or {})
    return _refusal(found, request.url.path)


class Application(Starlette):
    """Notes the connection's own `send`, for streams: each of their pieces would pass through five functions here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        scope["minillm.send"] = send
        await super().__call__(scope, receive, send)


class Front:
    """Runs around every request: its id, the key, failures that nothing else has caught, the log."""

    def __init__(self, app: ASGIApp, server: Server, keys: Sequence[str]) -> None:
        self._app, self._server, self._keys = app, server, keys
        self._paths = {route.path for route in _routes() if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        request_id = _request_id(scope)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            check_key(scope, self._keys)
            await self._app(scope, receive, sending)
        except ClientDisconnect:
            status = CLIENT_LEFT
        except ApiError as error:
            await _refusal(error, scope["path"])(scope, receive, sending)
        except Exception as error:
            _log_failure(request_id, error)
            if not status:  # else the server closes the connection, which is all that can be said
                message = "the server failed; its log says more, under the X-Request-Id of this response"
                found = ApiError(message, status=500, type="server_error", code="internal_error")
                await _refusal(found, scope["path"])(scope, receive, sending)
        finally:
            exchange: Exchange[Any] | TextsExchange | None = scope.pop("minillm.exchange", None)
            if exchange is not None:
                exchange.close()
            self._note(scope, exchange, request_id.decode(), status, time.monotonic() - began)

    def _note(
        self, scope: Scope, exchange: Exchange[Any] | TextsExchange | None, request_id: str, status: int, seconds: float
    ) -> None:
        """Count and log a request: no text of its, only what it cost."""
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._server.metrics.responses[path, str(status)] += 1
        level = logging.DEBUG if path in PROBES and status == 200 else logging.INFO
        if not access.isEnabledFor(level):
            return
        tokens, counts = "", {}
        if exchange is not None:
            found = exchange.usage()
            cached = found.prompt_tokens_details.cached_tokens
            counts = {"prompt": found.prompt_tokens, "cached": cached, "generated": found.completion_tokens}
            tokens = "".join(f" {name}={count}" for name, count in counts.items())
        client, method, path = (scope.get("client") or ("-",))[0], scope["method"], printable(scope["path"][:100])
        fields = {"client": client, "method": method, "path": path, "status": status, **counts}
        fields |= {"milliseconds": round(1000 * seconds), "request_id": request_id}
        line = f"{client} {method} {path} {status}{tokens} {1000 * seconds:.0f}ms {request_id}"
        access.log(level, "%s", printable(line), extra={"fields": fields})


def _request_id(scope: Scope) -> bytes:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _log_failure(request_id: bytes, error: Exception) -> None:
    """One line about an error of ours: what, and where in the source."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = "" if frame is None else f" ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})"
    logger.error("request %s failed: %s: %s%s", request_id.decode(), type(error).__name__, error, where)
