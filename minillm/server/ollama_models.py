"""Ollama's API about models: /api/tags, /api/ps, /api/show, /api/version. Source: as in `ollama`."""

import hashlib
import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .. import __version__
from ..checkpoint.gguf import is_gguf, read_gguf, read_shards
from ..errors import shown
from ..models import tensor_shapes
from ..models.base import stored_format, weights_of
from .exchange import json_of
from .protocol import ApiError

if TYPE_CHECKING:
    from .app import Server
    from .served import Served

CAPABILITIES = {"completion": "/v1/completions", "embedding": "/v1/embeddings"}
"""Ollama's words -> the endpoint of a model that can do it"""
FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    32: "BF16",
}
"""`general.file_type` of a GGUF file -> llama.cpp's name"""
SHORT = {"float": "F", "bfloat": "BF", "int": "INT"}
"""Kind of numbers -> its name before their bits"""
WEIGHT_FILES = (".safetensors", ".bin", ".gguf")

_STORED: "WeakKeyDictionary[Served, tuple[int, str, str]]" = WeakKeyDictionary()
"""What was read of the models' files"""


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
        cards.append(card(served) | forever | {"size_vram": memory, "context_length": served.context})
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
        "context_length": served.context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "vocab_size": config.vocab_size,
    }
    info = {"general.architecture": family, "general.parameter_count": _parameters(served)}
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
    config, path = served.engine.config, served.engine.path
    family = type(config).__name__.removesuffix("Config").lower()
    if served not in _STORED:
        _STORED[served] = _stored(path, served)
    size, form, quantization = _STORED[served]
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": moment(served.created),
        "size": size,
        "digest": hashlib.sha256(f"{served.fingerprint} {served.name}".encode()).hexdigest(),
        "details": {
            "parent_model": served.parent or "",
            "format": form,
            "family": family,
            "families": [family],
            "parameter_size": parameters_text(_parameters(served)),
            "quantization_level": quantization,
        },
    }


def _parameters(served: "Served") -> int:
    return sum(map(math.prod, tensor_shapes(served.engine.config).values()))


def _stored(path: Path | None, served: "Served") -> tuple[int, str, str]:
    """Bytes of a model's files, or of its weights in memory if it has none, their format, and their quantisation."""
    model = served.engine.runner.model
    numbers = stored_format(model)
    name = f"{SHORT[numbers.kind]}{numbers.bits}"
    if path is not None and is_gguf(path):
        gguf = read_gguf(path)
        files = [shard.path for shard in read_shards(gguf)]
        return _size(files), "gguf", FILE_TYPES.get(gguf.get("general.file_type", int, -1), name)
    files = [] if path is None or not path.is_dir() else [*path.iterdir()]
    size = _size([file for file in files if file.suffix in WEIGHT_FILES])
    return size or sum(weight.nbytes for weight in weights_of(model)), "safetensors", name


def _size(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


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
