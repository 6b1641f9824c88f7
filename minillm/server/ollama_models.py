"""Ollama's API about models: /api/tags, /api/ps, /api/show, /api/version. Source: as in `ollama`."""

import hashlib
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .. import __version__
from ..errors import shown
from .exchange import json_of
from .protocol import ApiError

if TYPE_CHECKING:
    from .app import Server
    from .served import Served

CAPABILITIES = {"completion": "/v1/completions", "embedding": "/v1/embeddings"}
"""Ollama's words -> the endpoint of a model that can do it"""


async def tags(request: Request) -> Response:
    """Answer GET /api/tags: the models."""
    server: Server = request.app.state.server
    return JSONResponse({"models": [card(served) for served in server.models.values()]})


async def running(request: Request) -> Response:
    """Answer GET /api/ps: the models, all of which are loaded."""
    server: Server = request.app.state.server
    forever = {"expires_at": "9999-12-31T23:59:59Z"}
    cards = []
    for served in server.models.values():
        memory = sum(taken.taken for taken in served.engine.device_memory)
        cards.append(card(served) | forever | {"size_vram": memory, "context_length": served.engine.context})
    return JSONResponse({"models": cards})


async def show(request: Request) -> Response:
    """Answer POST /api/show: about one model."""
    server: Server = request.app.state.server
    body = await json_of(request, server)
    served = server.model(model_name(body.get("model", body.get("name"))))
    engine, about = served.engine, card(served)
    template = "" if engine.chat_template is None else engine.chat_template.source
    capabilities = [name for name, path in CAPABILITIES.items() if path in served.endpoints]
    capabilities += ["tools"] if engine.chat_template is not None else []
    family, config = about["details"]["family"], engine.config
    sizes = {
        "context_length": served.engine.context,
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


async def version(request: Request) -> Response:
    """Answer GET /api/version."""
    return JSONResponse({"version": __version__})


def card(served: "Served") -> dict[str, Any]:
    """A model in a list."""
    family = type(served.engine.config).__name__.removesuffix("Config").lower()
    stored = served.engine.stored
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": moment(served.created),
        "size": stored.bytes,
        "digest": hashlib.sha256(f"{served.fingerprint} {served.name}".encode()).hexdigest(),
        "details": {
            "parent_model": served.parent or "",
            "format": stored.form,
            "family": family,
            "families": [family],
            "parameter_size": parameters_text(served.engine.summary()["parameters"]),
            "quantization_level": stored.numbers,
        },
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
