"""/v1/embeddings: texts as vectors, in OpenAI's form.

Source: OpenAI's API reference, "Create embeddings"; `normalize` and `truncate_prompt_tokens` are vLLM's.
"""

import base64
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ..tokenizer import EncodedText
from .protocol import ApiError
from .texts import TextsRequest, answer, listed_texts, read_request

PATH = "/v1/embeddings"


class EmbeddingsRequest(TextsRequest, kw_only=True):
    """/v1/embeddings."""

    input: Any
    """A text, a list of texts, token ids, or a list of lists of token ids"""
    encoding_format: Literal["float", "base64"] = "float"
    """base64: of the numbers as little-endian float32"""
    dimensions: int | None = None
    """Only so many leading numbers, for models trained for it"""
    normalize: bool | None = None
    """Divide each vector by its length; by default as the checkpoint says"""


class Embedding(Struct, kw_only=True):
    """The vector of a text."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Struct):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(Struct, kw_only=True):
    """The answer of /v1/embeddings."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


async def embeddings(request: Request) -> Response:
    """Answer POST /v1/embeddings."""
    asked, exchange = await read_request(request, EmbeddingsRequest, "embd", PATH)
    if asked.dimensions is not None and asked.dimensions < 1:
        message = f"dimensions={asked.dimensions}: expected a whole number of at least 1"
        raise ApiError(message, param="dimensions")
    served = exchange.served
    texts = await exchange.encode(listed_texts(asked.input, "input"), asked, "input")
    engine, lora = served.engine, served.lora
    normalize, dimensions = asked.normalize, asked.dimensions

    def vectors_of(encoded: list[EncodedText]) -> list[Any]:
        return [*engine.embed(encoded, normalize=normalize, dimensions=dimensions, lora=lora, progress=False)]

    vectors = await exchange.compute((PATH, normalize, dimensions, lora), vectors_of, texts)
    data = [
        Embedding(index=i, embedding=_in_base64(vector) if asked.encoding_format == "base64" else vector.tolist())
        for i, vector in enumerate(vectors)
    ]
    usage = EmbeddingsUsage(exchange.prompt_tokens, exchange.prompt_tokens)
    return answer(EmbeddingsResponse(data=data, model=served.name, usage=usage))


def _in_base64(vector: Any) -> str:
    return base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode("ascii")
