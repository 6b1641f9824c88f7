"""/tokenize, /detokenize and /tokenizer_info, in the form of vLLM's server."""

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..decoding.prompts import encode_text, need_tokenizer
from ..errors import MinillmError
from .generation_request import convert, refused
from .http_json import ApiError, json_response
from .state import Server


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/tokenize (vLLM): a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    """By default True for a text, False for a conversation, whose template writes them"""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/detokenize (vLLM)."""

    model: str | None = None
    tokens: list[int]


_OF_A_CHAT = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def tokenize(http: Request) -> Response:
    """Answer POST /tokenize: the tokens of a text, or of a conversation."""
    server = Server.of(http)
    asked = convert(_without_nulls(await server.read_json(http)), TokenizeRequest)
    model = await server.take(http, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError("expected prompt, a text, or messages, a conversation", param="prompt")
    for name in _OF_A_CHAT:
        if asked.messages is None and getattr(asked, name) is not None:
            raise ApiError(f"{name} has no effect without messages: leave it out", param=name)
    special = asked.add_special_tokens
    engine = model.engine

    def encoded() -> list[int]:
        text = model.render(asked, asked.tools) if asked.prompt is None else asked.prompt
        added = special is True or (special is None and asked.messages is None)
        return encode_text(text, engine.tokenizer, engine.config, add_special_tokens=added)

    try:
        ids = await model.aio.run(encoded)
    except MinillmError as error:
        raise refused(str(error), ("messages", "prompt", *_OF_A_CHAT)) from None
    texts = [model.texts.text(token) for token in ids] if asked.return_token_strs else None
    return json_response({"count": len(ids), "max_model_len": engine.context, "tokens": ids, "token_strs": texts})


async def detokenize(http: Request) -> Response:
    """Answer POST /detokenize: the text of tokens, special ones included."""
    server = Server.of(http)
    asked = convert(_without_nulls(await server.read_json(http)), DetokenizeRequest)
    engine = (await server.take(http, asked.model)).engine
    try:
        text = need_tokenizer(engine.tokenizer).decode(asked.tokens, skip_special_tokens=False)
    except MinillmError as error:
        raise ApiError(f"tokens: {error}", param="tokens") from None
    return json_response({"prompt": text})


async def tokenizer_info(http: Request) -> Response:
    """Answer GET /tokenizer_info: what a client needs that counts or renders by itself."""
    server = Server.of(http)
    model = await server.take(http, http.query_params.get("model"))
    engine = model.engine
    if engine.tokenizer is None:
        raise ApiError("this model has no tokenizer", status=404, code="not_found")
    ids = {"bos_token": engine.tokenizer.bos_token_id, "eos_token": engine.tokenizer.eos_token_id}
    template = engine.chat_template
    return JSONResponse(
        {
            "tokenizer_class": "minillm.text.tokenizer.Tokenizer",
            "model_max_length": model.engine.context,
            "vocab_size": engine.tokenizer.vocab_size,
            **{name: None if token is None else engine.tokenizer.token(token) for name, token in ids.items()},
            **{f"{name}_id": token for name, token in ids.items()},
            "chat_template": None if template is None else template.source,
        }
    )


def _without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}
