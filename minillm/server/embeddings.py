"""/v1/embeddings, /api/embed and /api/embeddings: texts as vectors, in OpenAI's form and in Ollama's.

Sources: OpenAI's API reference, "Create embeddings"; `normalize` and `truncate_prompt_tokens` are vLLM's,
`output_dtype` Mistral's and Voyage's; docs/api.md of the Ollama repository.
"""

import base64
import time
from typing import Any, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..tasks.quantized_vectors import Precision, quantize_vectors
from ..text.tokenizer import EncodedText
from .http_json import ApiError, json_response
from .text_requests import TextsRequest, TextsServerRequest, listed_texts, read_request

PATH = "/v1/embeddings"


class EmbeddingsRequest(TextsRequest, kw_only=True):
    """/v1/embeddings."""

    input: Any
    """A text, a list of texts, token ids, or a list of lists of token ids"""
    encoding_format: Literal["float", "base64"] = "float"
    """base64: the numbers as little-endian float32, or bytes"""
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] = "float"
    """Numbers of a vector: binary and ubinary have a bit of each, packed in bytes"""
    dimensions: int | None = None
    """Only so many leading numbers, for models trained for it"""
    normalize: bool | None = None
    """Divide each vector by its length; by default as the checkpoint says"""


async def embeddings(http: Request) -> Response:
    """Answer POST /v1/embeddings."""
    asked, request = await read_request(http, EmbeddingsRequest, "embd", PATH)
    if asked.output_dtype in ("int8", "uint8"):
        raise ApiError(
            f"output_dtype={asked.output_dtype}: it needs the range of each dimension, which a server does not know; "
            "ask for float and pack the vectors by quantize_vectors",
            param="output_dtype",
        )
    precision: Precision = "float32" if asked.output_dtype == "float" else asked.output_dtype
    vectors = await _vectors(request, asked.input, asked, normalize=asked.normalize, dimensions=asked.dimensions)
    vectors = [quantize_vectors(vector, precision) for vector in vectors]
    in_base64 = asked.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": i, "embedding": _in_base64(vector) if in_base64 else vector.tolist()}
        for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": request.prompt_tokens, "total_tokens": request.prompt_tokens}
    return json_response({"object": "list", "data": data, "model": request.model.name, "usage": usage})


async def _vectors(
    request: TextsServerRequest, texts: Any, asked: TextsRequest, *, normalize: bool | None, dimensions: int | None
) -> list[Any]:
    """The vectors of a request's texts."""
    if dimensions is not None and dimensions < 1:
        raise ApiError(f"dimensions={dimensions}: expected a whole number of at least 1", param="dimensions")
    engine, lora = request.model.engine, request.model.lora

    def vectors_of(encoded: list[EncodedText]) -> list[Any]:
        return [*engine.embed(encoded, normalize=normalize, dimensions=dimensions, lora=lora, progress=False)]

    encoded = await request.encode(listed_texts(texts, "input"), asked, "input")
    return await request.compute((PATH, normalize, dimensions, lora), vectors_of, encoded)


def _in_base64(vector: Any) -> str:
    numbers = vector if vector.dtype.itemsize == 1 else vector.astype(np.dtype("<f4"))
    return base64.b64encode(numbers.tobytes()).decode("ascii")


# --- Ollama -----------------------------------------------------------------------------------------------------------


class EmbedRequest(TextsRequest, kw_only=True):
    """/api/embed, and with `prompt` /api/embeddings."""

    input: Any = None
    """A text, or a list of texts"""
    prompt: str | None = None
    truncate: bool = True
    """Whether texts that are too long are cut, or refused"""
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    """Without effect"""


async def embed(http: Request) -> Response:
    """Answer POST /api/embed: vectors of length 1."""
    began = time.monotonic_ns()
    asked, request = await _read_embed(http)
    texts = asked.input if asked.input not in (None, "", []) else []  # a client asks to load the model, which it is
    vectors = await _vectors(request, texts, asked, normalize=True, dimensions=asked.dimensions) if texts else []
    return json_response(
        {
            "model": request.model.name,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": time.monotonic_ns() - began,
            "load_duration": 0,
            "prompt_eval_count": request.prompt_tokens,
        }
    )


async def embed_one(http: Request) -> Response:
    """Answer POST /api/embeddings, the older form: the vector of one text, as the checkpoint says."""
    asked, request = await _read_embed(http)
    vectors = await _vectors(request, asked.prompt, asked, normalize=None, dimensions=None) if asked.prompt else [()]
    return json_response({"embedding": [*map(float, vectors[0])]})


async def _read_embed(http: Request) -> tuple[EmbedRequest, TextsServerRequest]:
    asked, request = await read_request(http, EmbedRequest, "embd", PATH)
    asked.truncate_prompt_tokens = -1 if asked.truncate else None
    return asked, request
