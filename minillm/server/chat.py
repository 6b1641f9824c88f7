"""/v1/chat/completions: the answer to a conversation."""

from functools import partial
from typing import TYPE_CHECKING

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ..engine.results import Generation
from ..text.chat import Answer
from .exchange import Exchange, exchange_of
from .logprobs import chat_logprobs
from .protocol import AssistantMessage, ChatChoice, ChatLogprobs, ChatRequest, ChatResponse
from .streaming import ChunkWriter, StreamResponse, encode
from .tools import ToolUse, delta_json, ended, is_cut, message_calls
from .translate import CHAT

if TYPE_CHECKING:
    from ..decoding.event import Event
    from ..engine.results import Completion


async def chat_completions(request: Request) -> Response:
    """Answer POST /v1/chat/completions."""
    exchange = await exchange_of(request, CHAT, "chatcmpl")
    asked = exchange.asked.request
    use = exchange.tool_use()
    await exchange.submit(partial(exchange.render, asked, None if use is None else use.offered), 1, None)
    if asked.stream:
        return StreamResponse(exchange, _Writer(exchange, asked, use))
    [generation] = await exchange.results()
    return exchange.json(_response(exchange, asked, use, generation))


def _response(
    exchange: Exchange[ChatRequest], asked: ChatRequest, use: ToolUse | None, generation: Generation
) -> ChatResponse:
    answers = [
        Answer(completion.text) if use is None else use.read(completion) for completion in generation.completions
    ]
    return ChatResponse(
        choices=[
            ChatChoice(
                index=index,
                message=AssistantMessage(
                    content=None if answer.calls and not answer.content else answer.content,
                    tool_calls=message_calls(answer) if answer.calls else UNSET,
                ),
                logprobs=_logprobs(exchange, asked, completion),
                finish_reason=ended(completion.finish_reason, called=bool(answer.calls)),
                stop_reason=exchange.stop_reason(completion.stop_reason),
                token_ids=completion.token_ids if asked.return_token_ids else UNSET,
            )
            for index, (completion, answer) in enumerate(zip(generation.completions, answers, strict=True))
        ],
        usage=exchange.usage(),
        prompt_token_ids=generation.prompt_token_ids if asked.return_token_ids else UNSET,
        **exchange.head("chat.completion"),
    )


def _logprobs(exchange: Exchange[ChatRequest], asked: ChatRequest, piece: "Completion | Event") -> ChatLogprobs | None:
    if not piece.logprobs:
        return None
    return chat_logprobs(
        exchange.served.texts,
        piece.token_ids,
        piece.logprobs,
        piece.top_logprobs or (),
        as_ids=bool(asked.return_tokens_as_token_ids),
    )


class _Writer(ChunkWriter):
    """The role, then a chunk for each event, or each change of content and calls, and why it ends."""

    def __init__(self, exchange: Exchange[ChatRequest], asked: ChatRequest, use: ToolUse | None) -> None:
        with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        super().__init__(exchange.head("chat.completion.chunk"), exchange.usage if with_usage else None)
        self._exchange, self._asked = exchange, asked
        self._begun: set[int] = set()
        self._parsers = None if use is None else [use.parser() for _ in range(exchange.asked.n)]

    def write(self, prompt: int, event: "Event") -> bytes:
        """The chunks of an event."""
        index, asked = event.index, self._asked
        chunks = b"" if index in self._begun else self._begin(index)
        reason: str | None = event.finish_reason
        if self._parsers is None:
            if event.text and not (reason or event.logprobs or asked.return_token_ids):
                return chunks + self.text_chunk(index, event.text)
            deltas = [b'{"content":%b}' % encode(event.text)] if event.text else []
        else:
            parser = self._parsers[index]
            found = parser.push(event.text)
            if reason is not None:
                found += parser.finish(cut=is_cut(event))
                reason = ended(reason, called=parser.called)
            deltas = [*map(delta_json, found)]
        if not deltas and (event.logprobs or (asked.return_token_ids and event.token_ids)):
            deltas = [b'{"content":""}']
        logprobs = encode(_logprobs(self._exchange, asked, event)) if event.logprobs else b"null"
        ids = b',"token_ids":' + encode(event.token_ids) if asked.return_token_ids else b""
        for delta in deltas:
            chunks += self.chunk(
                b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}' % (index, delta, logprobs, ids)
            )
            logprobs, ids = b"null", b""  # once for each event
        if reason is not None:
            chunks += self.chunk(
                b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}'
                % (index, encode(reason), encode(self._exchange.stop_reason(event.stop_reason)))
            )
        return chunks

    def _text_choice(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{"content":TEXT},"logprobs":null,"finish_reason":null}' % index

    def _begin(self, index: int) -> bytes:
        """The first chunk of an answer."""
        self._begun.add(index)
        more = b""
        if self._asked.return_token_ids and len(self._begun) == 1:
            more = b',"prompt_token_ids":' + encode(self._exchange.prompts[0])
        return self.chunk(
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null%b}'
            % (index, more)
        )
