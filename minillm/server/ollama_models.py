"""Ollama's API about models: /api/tags, /api/ps, /api/show, /api/version. Source: as in `ollama`."""

import hashlib
import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .. import __version__
from ..errors import shown
from ..text.infill import infill_form
from .http_json import ApiError
from .model_pool import FOREVER, StoredModel
from .served_model import ServedModel
from .state import Server

CAPABILITIES = {"completion": "/v1/completions", "embedding": "/v1/embeddings"}
"""Ollama's words -> the endpoint of a model that can do it"""


async def tags(http: Request) -> Response:
    """Answer GET /api/tags: the models, loaded or not."""
    server = Server.of(http)
    cards = [card(model) for model in server.models.values()]
    unloaded = [model for name, model in server.pool.stored.items() if name not in server.pool.loaded]
    return JSONResponse({"models": [*cards, *map(_unloaded_card, unloaded)]})


async def running(http: Request) -> Response:
    """Answer GET /api/ps: the models that are loaded, and until when."""
    server = Server.of(http)
    cards = []
    for name, model in server.models.items():
        left = FOREVER if name in server.fixed else server.pool.expires(name)
        until = {"expires_at": "9999-12-31T23:59:59Z" if left == FOREVER else moment(time.time() + left)}
        memory = sum(used.taken for used in model.engine.device_memory)
        cards.append(card(model) | until | {"size_vram": memory, "context_length": model.engine.context})
    return JSONResponse({"models": cards})


async def show(http: Request) -> Response:
    """Answer POST /api/show: about one model."""
    server = Server.of(http)
    body = await server.read_json(http)
    model = await server.take(http, model_name(body.get("model", body.get("name"))))
    engine, about = model.engine, card(model)
    template = "" if engine.chat_template is None else engine.chat_template.source
    capabilities = [name for name, path in CAPABILITIES.items() if path in model.endpoints]
    capabilities += ["tools"] if engine.chat_template is not None else []
    capabilities += ["insert"] if infill_form(engine.tokenizer) is not None else []
    capabilities += ["thinking"] if model.reasoning_format is not None else []
    family, config = about["details"]["family"], engine.config
    sizes = {
        "context_length": model.engine.context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "vocab_size": config.vocab_size,
    }
    info = {"general.architecture": family, "general.parameter_count": engine.summary()["parameters"]}
    return JSONResponse(
        {
            "modelfile": "",
            "parameters": "",
            "template": template,
            "details": about["details"],
            "model_info": info | {f"{family}.{name}": size for name, size in sizes.items()},
            "capabilities": capabilities,
            "modified_at": about["modified_at"],
        }
    )


async def version(http: Request) -> Response:
    """Answer GET /api/version."""
    return JSONResponse({"version": __version__})


def card(model: ServedModel) -> dict[str, Any]:
    """A model in a list."""
    family = type(model.engine.config).__name__.removesuffix("Config").lower()
    stored = model.engine.stored
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": moment(model.created),
        "size": stored.bytes,
        "digest": hashlib.sha256(f"{model.fingerprint} {model.name}".encode()).hexdigest(),
        "details": {
            "parent_model": model.parent or "",
            "format": stored.form,
            "family": family,
            "families": [family],
            "parameter_size": parameters_text(model.engine.summary()["parameters"]),
            "quantization_level": stored.numbers,
        },
    }


def _unloaded_card(model: StoredModel) -> dict[str, Any]:
    """A model in a list that is not loaded: what its files say without being read."""
    about = {"parent_model": "", "format": model.format, "family": "", "families": []}
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": moment(model.modified),
        "size": model.bytes,
        "digest": hashlib.sha256(f"{model.name} {model.bytes} {model.modified}".encode()).hexdigest(),
        "details": about | {"parameter_size": "", "quantization_level": ""},
    }


def parameters_text(count: int) -> str:
    """A number of parameters as Ollama writes it: "8.0B", "134.52M"."""
    if count >= 1e9:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.2f}K"


def moment(seconds: float | None = None) -> str:
    """A time as Ollama writes it; by default now."""
    time_of = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return time_of.isoformat(timespec="microseconds").replace("+00:00", "Z")


def model_name(name: Any) -> str:
    """The name of a request's model, which has to be there."""
    if not isinstance(name, str):
        raise ApiError(f"model: expected a name, found {shown(name)}")
    return name
