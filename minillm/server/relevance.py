"""/classify, /score and /rerank: labels of texts, and how much a text has to do with another.

/score and /rerank use a reranker (a cross-encoder with one label, or a causal LM made for it) or, with a model that
embeds, the vectors, compared as the checkpoint says: by their cosine, if it says nothing.

Source: vLLM's documentation, "Classification API", "Score API", "Re-rank API"; /rerank is also Jina's and Cohere's.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..tasks.embedding import Classification
from ..tasks.late_interaction import ROLES, Role
from ..text.tokenizer import EncodedText
from .http_json import ApiError, json_response
from .text_requests import TextsRequest, TextsServerRequest, listed_texts, read_request

CLASSIFY, SCORE, RERANK = "/classify", "/score", "/rerank"


class ClassifyRequest(TextsRequest, kw_only=True):
    """/classify."""

    input: Any
    """A text, a list of texts, token ids, or a list of lists of token ids"""
    use_activation: bool = True
    """False: logits in the place of probabilities"""


class ScoreRequest(TextsRequest, kw_only=True):
    """/score."""

    text_1: str | list[str]
    """One text, for each of `text_2`; or as many"""
    text_2: str | list[str]


class RerankRequest(TextsRequest, kw_only=True):
    """/rerank."""

    query: str
    documents: list[Any]
    """Texts, or objects {"text"}"""
    top_n: int | None = None
    """Only so many, the best; by default all"""
    return_documents: bool = True


async def classify(http: Request) -> Response:
    """Answer POST /classify."""
    asked, request = await read_request(http, ClassifyRequest, "classify", CLASSIFY)
    texts = await request.encode(listed_texts(asked.input, "input"), asked, "input")
    data: list[dict[str, Any]] = []
    for i, classification in enumerate(await _classified(request, texts, raw=not asked.use_activation)):
        probs = [label.score for label in sorted(classification.labels, key=lambda label: label.index)]
        data.append({"index": i, "label": classification.label, "probs": probs, "num_classes": len(probs)})
    return _list(request, data)


async def score(http: Request) -> Response:
    """Answer POST /score."""
    asked, request = await read_request(http, ScoreRequest, "score", SCORE)
    first, second = ([text] if isinstance(text, str) else text for text in (asked.text_1, asked.text_2))
    if not (first and second) or len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}: expected one, or as many, for at least one"
        raise ApiError(message, param="text_1")
    pairs = list(zip(first * (len(second) // len(first)), second, strict=True))
    scores = await _relevance(request, asked, pairs, "text_2")
    return _list(request, [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)])


async def rerank(http: Request) -> Response:
    """Answer POST /rerank."""
    asked, request = await read_request(http, RerankRequest, "rerank", RERANK)
    documents = [_document(document, i) for i, document in enumerate(asked.documents)]
    if not documents:
        raise ApiError("documents: expected at least one", param="documents")
    if asked.top_n is not None and asked.top_n < 1:
        raise ApiError(f"top_n={asked.top_n}: expected a whole number of at least 1", param="top_n")
    scores = await _relevance(request, asked, [(asked.query, document) for document in documents], "documents")
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: asked.top_n]
    results = []
    for i in order:
        document = {"document": {"text": documents[i]}} if asked.return_documents else {}
        results.append({"index": i, **document, "relevance_score": scores[i]})
    answer = {"id": request.id, "model": request.model.name, "usage": request.usage(), "results": results}
    return json_response(answer)


def _document(value: Any, index: int) -> str:
    text = value.get("text") if isinstance(value, dict) and value.keys() == {"text"} else value
    if not isinstance(text, str):
        raise ApiError(f'documents[{index}]: expected a text or an object with "text"', param=f"documents[{index}]")
    return text


async def _relevance(
    request: TextsServerRequest, asked: TextsRequest, pairs: list[tuple[str, str]], param: str
) -> list[float]:
    """A score for each pair: the reranker's, or how alike the two vectors are."""
    if request.model.engine.labels:
        classifications = await _classified(request, await request.encode(pairs, asked, param))
        return [classification.score for classification in classifications]
    if request.model.engine.embedding.late is not None:
        return await _late(request, asked, pairs, param)
    distinct = list(dict.fromkeys(text for pair in pairs for text in pair))
    texts = await request.encode(distinct, asked, param, len(pairs))  # a query is no text of its own
    engine, lora = request.model.engine, request.model.lora

    def vectors_of(encoded: list[EncodedText]) -> list[Any]:
        return [*engine.embed(encoded, lora=lora, progress=False)]

    vectors = await request.compute((SCORE, lora), vectors_of, texts)
    vector_of = dict(zip(distinct, vectors, strict=True))
    return [engine.embedding.compare(vector_of[first], vector_of[second]) for first, second in pairs]


async def _late(
    request: TextsServerRequest, asked: TextsRequest, pairs: list[tuple[str, str]], param: str
) -> list[float]:
    """A score for each pair, by the vectors of their tokens."""
    engine, lora = request.model.engine, request.model.lora
    vectors: dict[Role, dict[str, Any]] = {}
    for i, role in enumerate(ROLES):
        texts = list(dict.fromkeys(pair[i] for pair in pairs))
        encoded = await request.encode(texts, asked, param, len(pairs), role)

        def vectors_of(some: list[EncodedText], role: Role = role) -> list[Any]:
            return [*engine.embed_tokens([*some], role, lora=lora, progress=False)]

        vectors[role] = dict(zip(texts, await request.compute((SCORE, role, lora), vectors_of, encoded), strict=True))
    assert engine.embedding.late is not None
    compare = engine.embedding.late.compare
    return [compare(vectors["query"][query], vectors["document"][document]) for query, document in pairs]


async def _classified(request: TextsServerRequest, texts: list[EncodedText], raw: bool = False) -> list[Classification]:
    """The labels of texts; `raw`: with logits in the place of scores."""
    engine, lora = request.model.engine, request.model.lora

    def labels_of(encoded: list[EncodedText]) -> list[Any]:
        labels: Any = engine.classify([*encoded], function="none" if raw else None, lora=lora, progress=False)
        return [*labels]

    return await request.compute((CLASSIFY, raw, lora), labels_of, texts)


def _list(request: TextsServerRequest, data: list[dict[str, Any]]) -> Response:
    head = {"id": request.id, "object": "list", "created": request.created, "model": request.model.name}
    return json_response(head | {"data": data, "usage": request.usage()})
