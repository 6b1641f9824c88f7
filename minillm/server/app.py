"""The application: its models and routes, and errors in OpenAI's shape."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from .. import __version__
from ..decoding.checkpoint_fields import chat_sampling
from ..engine.async_engine import AsyncEngine
from ..engine.engine import Engine
from ..errors import UsageError, shown
from ..text.chat import FORMATS, REASONING_FORMATS
from . import anthropic, ollama
from .embeddings import embeddings
from .http_json import ApiError, json_response
from .infill import infill
from .inspection import inspection_routes
from .limits import Limits
from .middleware import Answer, Application, RequestMiddleware, refusal
from .model_pool import IDLE_TIMEOUT, ModelPool, StoredModel
from .page import page_routes
from .relevance import classify, rerank, score
from .responses import responses
from .served_model import ServedModel, server_defaults
from .state import Server
from .text_generation import chat_completions, completions
from .tokenization import detokenize, tokenize, tokenizer_info
from .tracing import Tracing
from .transcriptions import transcriptions, translations


def make_app(
    engines: Mapping[str, Engine | AsyncEngine] | Engine | AsyncEngine,
    *,
    limits: Limits | None = None,
    max_waiting: int = 1024,
    sampling: Literal["openai", "checkpoint"] = "openai",
    keys: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    tool_parser: str | None = None,
    reasoning_format: str = "auto",
    stored: Mapping[str, StoredModel] = MappingProxyType({}),
    load: Callable[[Path], Engine] = Engine,
    idle_timeout: float = IDLE_TIMEOUT,
    max_loaded: int | None = None,
    tracing: Tracing | None = None,
    routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """The application, for uvicorn or another ASGI server. It closes the engines when it ends.

    Args:
        engines: by the names of the models in requests; one alone is called "minillm". The first is the default. LoRA
            adapters of an engine are models under their own names
        limits: a request's limits
        max_waiting: requests that may wait in each engine's queue; further ones get status 429
        sampling: where the defaults of temperature, top_p etc. come from: OpenAI's API, or a checkpoint's
            generation_config.json, as far as it has them
        keys: API keys; a request needs one; none: open to all
        cors_origins: sites whose pages may use the server in a browser; "*" for all
        tool_parser: format of tool calls, one of `minillm.text.chat.FORMATS`; by default each model's template's
        reasoning_format: format of thoughts, one of `minillm.text.chat.REASONING_FORMATS`; "auto": each model's
            template's; "none": thoughts stay in the content
        stored: models on disk by the names in requests, which are loaded when a request names them (`stored_models`)
        load: makes the engine of one
        idle_timeout: seconds after its last request for which such a model stays loaded
        max_loaded: such models that are loaded at once; by default as many as memory holds
        tracing: takes a span of each request, such as `tracing.otlp_tracing`; closed with the application
        routes: further ones
    """
    named = engines if isinstance(engines, Mapping) else {"minillm": engines}
    forms: dict[str, Any] = {"tool_parser": None if tool_parser is None else FORMATS[tool_parser]}
    if reasoning_format != "auto":
        forms["reasoning_format"] = None if reasoning_format == "none" else REASONING_FORMATS[reasoning_format]
    models: dict[str, ServedModel] = {}
    for name, engine in named.items():
        for served in _served(name, engine, max_waiting, sampling, forms):
            models.setdefault(served.name, served)
    if same := stored.keys() & models.keys():
        raise UsageError(f"two models are called {shown(min(same))}: give one another name")

    def load_stored(model: StoredModel) -> ServedModel:
        return next(_served(model.name, load(model.path), max_waiting, sampling, forms))

    pool = ModelPool(stored, load_stored, idle_timeout=idle_timeout, max_loaded=max_loaded)
    server = Server(models, limits or Limits(), pool)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await server.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    paths = {route.path for route in _routes() if isinstance(route, Route)}
    middleware = [Middleware(RequestMiddleware, server=server, keys=keys, paths=paths, tracing=tracing, direct=DIRECT)]
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
    name: str,
    engine: Engine | AsyncEngine,
    max_waiting: int,
    sampling: Literal["openai", "checkpoint"],
    forms: Mapping[str, Any],
) -> Iterator[ServedModel]:
    """A model, then its adapters."""
    aio = engine if isinstance(engine, AsyncEngine) else AsyncEngine(engine, max_waiting=max_waiting)
    own = chat_sampling(aio.engine.generation_defaults)
    aio.engine.generation_defaults = server_defaults(aio.engine.generation_defaults, sampling)
    make: Callable[..., ServedModel] = partial(
        ServedModel, aio=aio, max_waiting=max_waiting, chat_sampling=own, **forms
    )
    base = make(name)
    yield base
    for adapter in aio.engine.adapters:
        tuned = make(adapter, parent=name, lora=adapter)
        tuned.queue = base.queue
        yield tuned


DIRECT: Mapping[str, Answer] = {"/v1/completions": completions, "/v1/chat/completions": chat_completions}
"""Endpoints whose POST requests take the short way: of `RequestMiddleware`"""


# --- endpoints --------------------------------------------------------------------------------------------------------


def _routes() -> list[BaseRoute]:
    return [
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/messages", anthropic.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", anthropic.count_tokens, methods=["POST"]),
        *ollama.routes(),
        Route("/infill", infill, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v1/audio/transcriptions", transcriptions, methods=["POST"]),
        Route("/v1/audio/translations", translations, methods=["POST"]),
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


async def models(http: Request) -> Response:
    """Answer GET /v1/models."""
    server = Server.of(http)
    names = {**server.fixed, **server.pool.stored}
    return json_response({"data": [_card(server, name) for name in names], "object": "list"})


async def model(http: Request) -> Response:
    """Answer GET /v1/models/{id}."""
    server = Server.of(http)
    return json_response(_card(server, server.find(http.path_params["model"])))


async def health(http: Request) -> Response:
    """Answer GET /health: whether new requests are taken."""
    draining = Server.of(http).draining
    return JSONResponse({"status": "draining" if draining else "ok"}, status_code=503 if draining else 200)


async def version(http: Request) -> Response:
    """Answer GET /version."""
    return JSONResponse({"version": __version__})


async def metrics(http: Request) -> Response:
    """Answer GET /metrics."""
    return Response(Server.of(http).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _card(server: Server, name: str) -> dict[str, Any]:
    """A model in a list; whether one of the pool is loaded stands in it as llama.cpp's router says it."""
    model, stored = server.models.get(name), server.pool.stored.get(name)
    card: dict[str, Any] = {"id": name, "object": "model", "owned_by": "minillm", "root": name, "parent": None}
    if model is not None:
        card |= {"created": model.created, "parent": model.parent, "max_model_len": model.engine.context}
    if stored is not None:
        card |= {"created": int(stored.modified), "status": {"value": "unloaded" if model is None else "loaded"}}
    return card


# --- errors -----------------------------------------------------------------------------------------------------------


async def _api_error(http: Request, error: Exception) -> Response:  # async: starlette runs others in threads
    assert isinstance(error, ApiError)
    return refusal(error, http.url.path)


async def _http_error(http: Request, error: Exception) -> Response:
    """An unknown path or a wrong method, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    path, method = shown(http.url.path), shown(http.method)
    if error.status_code == 404:
        refused = ApiError(f"there is nothing at {path}", status=404, code="not_found")
    elif error.status_code == 405:
        allowed = dict(error.headers or {}).get("Allow", "others")
        refused = ApiError(f"{path} does not take {method}: it takes {allowed}", status=405, code="method_not_allowed")
    else:
        refused = ApiError(str(error.detail), status=error.status_code)
    refused.headers |= dict(error.headers or {})
    return refusal(refused, http.url.path)
