"""The page's own paths, beyond OpenAI's API: models and strategies, tokens as bytes, attention, the cache's load.

GET  /inspect/models      each model's sizes, and the strategies with the fields of a request that select them
GET  /inspect/load        requests that wait and run, pages of the K/V cache; of ?model=...
POST /inspect/tokens      {token_ids} -> text, bytes and kind of each
POST /inspect/attention   {token_ids, layer} -> what the last of them attends to
POST /inspect/steps       {prompt, temperature, ...} -> the next token's distribution before and after each step
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..decoding.fields import FIELDS
from ..decoding.prompts import need_tokenizer
from ..errors import MinillmError
from ..measure.comparison import STRATEGIES, Variant
from .generation_request import COMPLETIONS, convert, refused, translate
from .http_json import ApiError, encode, json_response
from .served_model import ServedModel
from .server_request import until_gone
from .state import Server

MOST_TOKENS = 10_000
"""Tokens whose texts one request asks for"""
MOST_WEIGHTS = 1_000_000
"""Attention weights in one answer: 10 MB as JSON"""


class TokensRequest(Struct, forbid_unknown_fields=True):
    """/inspect/tokens."""

    token_ids: list[int]
    model: str | None = None


class AttentionRequest(Struct, forbid_unknown_fields=True):
    """/inspect/attention."""

    token_ids: list[int]
    """A text; its last token is the one that attends"""
    layer: int | None = None
    """By default all"""
    model: str | None = None


def inspection_routes() -> list[Route]:
    """The routes of this module."""
    return [
        Route("/inspect/models", models),
        Route("/inspect/load", load),
        Route("/inspect/tokens", tokens, methods=["POST"]),
        Route("/inspect/attention", attention, methods=["POST"]),
        Route("/inspect/steps", steps, methods=["POST"]),
    ]


RECOMMENDED = "recommended sampling"
"""The strategy with which the page begins: the checkpoint's own sampling, or what suits most models"""


def strategies(model: ServedModel) -> list[dict[str, Any]]:
    """The strategies that the page offers: the name of each, and the fields of a request that select it.

    The first is that of the model itself; the others are those of `minillm compare`.
    """
    own = Variant(RECOMMENDED, model.chat_sampling)
    return [{"name": variant.name, "fields": _over_http(variant.fields)} for variant in (own, *STRATEGIES)]


def _over_http(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Generation fields as OpenAI's API has them: a temperature of 0 says that nothing is drawn."""
    said = dict(fields)
    if not said.pop("do_sample"):
        said = {name: value for name, value in said.items() if FIELDS[name].needs != "do_sample" or name == "top_k"}
        said["temperature"] = 0
    return said


async def models(http: Request) -> Response:
    """Answer GET /inspect/models: those that continue a text, as the page does; of one that is not loaded the name.

    The model of ?model=... is loaded, and without a loaded model the first.
    """
    server = Server.of(http)
    chosen = http.query_params.get("model")
    if chosen in server.pool.stored or not server.models:
        await server.take(http, chosen or next(iter(server.pool.stored)))
    sizes = [_sizes(model) for model in server.models.values() if "/v1/chat/completions" in model.endpoints]
    if not sizes:
        raise ApiError("no model here continues texts, as this page shows it", status=404, code="not_found")
    unloaded = [{"name": name} for name in server.pool.stored if name not in server.models]
    return json_response({"models": sizes + unloaded})


def _sizes(model: ServedModel) -> dict[str, Any]:
    engine = model.engine
    return {
        "name": model.name,
        "chat": engine.chat_template is not None,
        "layers": engine.config.num_layers,
        "heads": engine.config.num_heads,
        "context": model.engine.context,
        "vocabulary": engine.config.vocab_size,
        "strategies": strategies(model),
    }


async def load(http: Request) -> Response:
    """Answer GET /inspect/load."""
    server = Server.of(http)
    model = await server.take(http, http.query_params.get("model"))
    load = model.aio.load()
    names = ("waiting", "running", "free_pages", "total_pages")
    cached = model.engine.runner.cache.cached_pages  # free ones whose contents later prompts may share
    return json_response({name: getattr(load, name) for name in names} | {"cached_pages": cached})


async def tokens(http: Request) -> Response:
    """Answer POST /inspect/tokens.

    `text` is for display, also of bytes that are not a whole character. `bytes` are UTF-8, maybe of a part of a
    character; a special token's are its name. `special` tokens are no text.
    """
    server = Server.of(http)
    asked = convert(await server.read_json(http), TokensRequest)
    model = await server.take(http, asked.model)
    if len(asked.token_ids) > MOST_TOKENS:
        raise ApiError(f"token_ids: at most {MOST_TOKENS}, found {len(asked.token_ids)}", param="token_ids")
    try:
        tokenizer = need_tokenizer(model.engine.tokenizer)
        shown = [
            {
                "text": tokenizer.token(token),
                "bytes": list(tokenizer.token_bytes(token)),
                "special": token in tokenizer.special_ids,
            }
            for token in asked.token_ids
        ]
    except MinillmError as error:
        raise ApiError(str(error), param="token_ids") from None
    return json_response({"tokens": shown})


async def attention(http: Request) -> Response:
    """Answer POST /inspect/attention.

    The text is computed anew, in chunks between the steps of running requests, and one text at a time.
    """
    server = Server.of(http)
    asked = convert(await server.read_json(http), AttentionRequest)
    model = await server.take(http, asked.model)
    engine = model.engine

    def answer() -> bytes:
        weights = engine.attention(asked.token_ids, layers, lora=model.lora)
        return encode({"weights": weights.astype(np.float64).round(6).tolist()})

    layers = None if asked.layer is None else [asked.layer]
    count = engine.config.num_layers if layers is None else 1
    if count * engine.config.num_heads * len(asked.token_ids) > MOST_WEIGHTS:
        raise ApiError(f"more than {MOST_WEIGHTS} weights: ask for one layer, or of a shorter text", param="token_ids")
    try:
        async with server.looking_inside:
            weights = await until_gone(http.receive, asyncio.to_thread(answer))
    except MinillmError as error:
        refusal = refused(str(error), ("layer",))
        refusal.param = refusal.param or "token_ids"
        raise refusal from None
    return Response(weights, media_type="application/json")


SHOWN = 8
"""Likeliest tokens of the model's distribution, and of the last one"""


async def steps(http: Request) -> Response:
    """Answer POST /inspect/steps: `engine.explain` of a body as /v1/completions takes it, with one prompt.

    The prompt is taken for the whole text, so a penalty that counts generated tokens alone counts none here.
    """
    server = Server.of(http)
    asked = translate(await server.read_json(http), COMPLETIONS)
    model = await server.take(http, asked.body.model)
    if isinstance(asked.body.prompt, list) and not all(isinstance(token, int) for token in asked.body.prompt):
        raise ApiError("prompt: expected one text, or the token ids of one", param="prompt")

    def answer() -> bytes:
        explanation = model.engine.explain(asked.body.prompt, lora=model.lora, progress=False, **asked.fields)
        tokens = explanation.likeliest(SHOWN)
        return encode(
            {
                "token_ids": tokens,
                "greedy": explanation.greedy,
                "steps": [
                    {
                        "name": step.name,
                        "tokens_left": step.tokens_left,
                        "entropy": round(step.entropy, 6),
                        "probabilities": step.probabilities[tokens].tolist(),
                    }
                    for step in explanation.steps
                ],
            }
        )

    try:
        async with server.looking_inside:
            distributions = await until_gone(http.receive, asyncio.to_thread(answer))
    except MinillmError as error:
        raise asked.error(error) from None
    return Response(distributions, media_type="application/json")
