"""/tokenize, /detokenize and /tokenizer_info, in the form of vLLM's server."""

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..decoding.prompts import encode_text, need_tokenizer
from ..errors import MinillmError
from .exchange import json_of
from .protocol import ApiError, DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from .streaming import encode
from .translate import convert, refused

if TYPE_CHECKING:
    from .app import Server

_OF_A_CHAT = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def tokenize(request: Request) -> Response:
    """Answer POST /tokenize: the tokens of a text, or of a conversation."""
    server: Server = request.app.state.server
    asked = convert(_without_nulls(await json_of(request, server)), TokenizeRequest)
    served = server.model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError("expected prompt, a text, or messages, a conversation", param="prompt")
    for name in _OF_A_CHAT:
        if asked.messages is None and getattr(asked, name) is not None:
            raise ApiError(f"{name} has no effect without messages: leave it out", param=name)
    special = asked.add_special_tokens
    engine = served.engine

    def encoded() -> list[int]:
        text = served.render(asked, asked.tools) if asked.prompt is None else asked.prompt
        added = special is True or (special is None and asked.messages is None)
        return encode_text(text, engine.tokenizer, engine.config, add_special_tokens=added)

    try:
        ids = await served.aio.run(encoded)
    except MinillmError as error:
        raise refused(str(error), ("messages", "prompt", *_OF_A_CHAT)) from None
    texts = [served.texts.text(token) for token in ids] if asked.return_token_strs else None
    answer = TokenizeResponse(len(ids), served.engine.context, ids, texts)
    return Response(encode(answer), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """Answer POST /detokenize: the text of tokens, special ones included."""
    server: Server = request.app.state.server
    asked = convert(_without_nulls(await json_of(request, server)), DetokenizeRequest)
    engine = server.model(asked.model).engine
    try:
        text = need_tokenizer(engine.tokenizer).decode(asked.tokens, skip_special_tokens=False)
    except MinillmError as error:
        raise ApiError(f"tokens: {error}", param="tokens") from None
    return Response(encode(DetokenizeResponse(text)), media_type="application/json")


async def tokenizer_info(request: Request) -> Response:
    """Answer GET /tokenizer_info: what a client needs that counts or renders by itself."""
    server: Server = request.app.state.server
    served = server.model(request.query_params.get("model"))
    engine = served.engine
    if engine.tokenizer is None:
        raise ApiError("this model has no tokenizer", status=404, code="not_found")
    ids = {"bos_token": engine.tokenizer.bos_token_id, "eos_token": engine.tokenizer.eos_token_id}
    template = engine.chat_template
    return JSONResponse(
        {
            "tokenizer_class": "minillm.text.tokenizer.Tokenizer",
            "model_max_length": served.engine.context,
            "vocab_size": engine.tokenizer.vocab_size,
            **{name: None if token is None else engine.tokenizer.token(token) for name, token in ids.items()},
            **{f"{name}_id": token for name, token in ids.items()},
            "chat_template": None if template is None else template.source,
        }
    )


def _without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}
