"""/v1/messages: text, thoughts and calls of tools by Anthropic's Messages API, and /v1/messages/count_tokens.

Source: Anthropic's API reference, "Messages" and "Streaming messages". A conversation is read as the chat that it
stands for: results of tools become messages of their own, thoughts go to templates that read them, and a last message
of the assistant is continued. Blocks and tools of Anthropic's own services (web search, code execution) are skipped,
with a line in the log for each type. Generation fields of the engine are taken as in /v1/chat/completions. `max_tokens`
is a cap, which may be above what the context holds, as coding agents always send the same.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..decoding import foreign
from ..decoding.event import Event
from ..engine.results import Completion
from ..errors import shown
from ..text.chat.calls import AnswerDelta, ArgumentsDelta, CallBegin, ReasoningDelta
from .generation_request import (
    NAMES,
    ChatRequest,
    Endpoint,
    GenerationRequest,
    ResponseFormat,
    Translated,
    convert_chat,
    translate,
)
from .http_json import ApiError, encode, json_response, new_id
from .messages import log_skipped
from .server_request import ServerRequest
from .state import Server
from .streaming import AnswerWriter, StreamResponse
from .tools import arguments_of, is_cut

PATH = "/v1/messages"
_MEDIA = ("image", "document", "container_upload")
"""Types of blocks without which an answer would visibly be another"""
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Status -> Anthropic's type of an error; all others are "api_error\""""
_BILLING = "x-anthropic-billing-header:"
"""Begins a block of `system` in which Claude Code tells its version and session, which no model needs; it would keep
prompts of other sessions from beginning alike"""


class MessagesRequest(GenerationRequest, kw_only=True):
    """/v1/messages."""

    messages: list[Any]
    system: Any = None
    """A text, or blocks of text"""
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    """`effort` is a variable of the template, if it uses it; `format` a JSON schema of the answer"""


MESSAGES = Endpoint(MessagesRequest, foreign.MESSAGES, NAMES | {"stop_strings": "stop_sequences"})


async def messages(http: Request) -> Response:
    """Answer POST /v1/messages."""
    request = await _read(http)
    use = request.tool_use()
    await request.submit(partial(request.render, use), 1, None)
    answer = _Answer(request)
    if request.body.stream:
        return StreamResponse(request, answer)
    [generation] = await request.results()
    return json_response(answer.whole(generation.completions[0]))


async def count_tokens(http: Request) -> Response:
    """Answer POST /v1/messages/count_tokens: the tokens of the prompt that a request would have."""
    request = await _read(http)
    [prompt] = request.encoded(request.tool_use())
    return json_response({"input_tokens": len(prompt)})


def error_body(error: ApiError) -> bytes:
    """An error in Anthropic's shape."""
    kind, message = _ERRORS.get(error.status, "api_error"), str(error)
    if error.code == "context_length_exceeded":  # agents look for these words, and then shorten their conversation
        message = f"prompt is too long: {message}"
    return encode({"type": "error", "error": {"type": kind, "message": message}})


# --- reading ----------------------------------------------------------------------------------------------------------


async def _read(http: Request) -> ServerRequest[ChatRequest]:
    """A request as the chat that it stands for.

    Raises:
        ApiError: its body is malformed, has a field that is not offered, or names a model that is not here.
    """
    server = Server.of(http)
    body = await server.read_json(http)
    asked = _translated(body)
    return ServerRequest(server, await server.take(http, asked.body.model), asked, "msg", http)


def _translated(body: Mapping[str, Any]) -> Translated[ChatRequest]:
    asked = translate(body, MESSAGES)
    given, thinking = asked.body, body.get("thinking")
    output = given.output_config or {}
    effort, form = output.get("effort"), output.get("format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "json_schema"):
        expected = 'expected {"type": "json_schema", "schema": ...}'
        raise ApiError(f"output_config.format: {expected}, found {shown(form)}", param="output_config")
    conversation = _conversation(given)
    choice = given.tool_choice or {}
    chat = ChatRequest(
        model=given.model,
        stream=given.stream,
        messages=conversation,
        tools=_tools(given.tools),
        tool_choice=_choice(given.tool_choice),
        parallel_tool_calls=False if choice.get("disable_parallel_tool_use") is True else None,
        response_format=None if form is None else ResponseFormat("json_schema", {"schema": form.get("schema")}),
        continue_final_message=_is_prefix(conversation[-1]) or None,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
        priority=given.priority,
        timeout=given.timeout,
        enable_thinking=thinking.get("type") != "disabled" if isinstance(thinking, dict) else None,
        reasoning_effort=effort if isinstance(effort, str) else None,
    )
    convert_chat(chat, asked.fields, asked.names, "output_config.format", "output_config.format")
    return replace(asked, body=chat, capped=True)  # type: ignore[arg-type, return-value]


def _is_prefix(message: Mapping[str, Any]) -> bool:
    """True for a message of the assistant that the answer continues."""
    return message["role"] == "assistant" and bool(message["content"]) and "tool_calls" not in message


def _conversation(given: MessagesRequest) -> list[dict[str, Any]]:
    """The conversation in OpenAI's form: the system's text, and each message's blocks."""
    chat: list[dict[str, Any]] = []
    system = [block for block in _blocks("system", given.system or []) if not _is_billing(block)]
    if system:
        chat.append({"role": "system", "content": _texts("system", system)})
    for i, message in enumerate(given.messages):
        where, role = f"messages[{i}]", message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            expected = 'expected {"role": "user" or "assistant", "content": ...}'
            raise ApiError(f"{where}: {expected}, found {shown(message)}", param="messages")
        content = message.get("content")
        if role == "assistant":
            chat.append(_assistant(where, content))
        else:
            chat += _user(where, role, content)
    if not given.messages:
        raise ApiError("messages: expected at least one message", param="messages")
    return chat


def _is_billing(block: Mapping[str, Any]) -> bool:
    return str(block.get("text")).startswith(_BILLING)


def _blocks(where: str, content: Any) -> list[dict[str, Any]]:
    """The blocks of a content, which may be a text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(
        isinstance(block, dict) and isinstance(block.get("type"), str) for block in content
    ):
        raise ApiError(
            f"{where}.content: expected a text, or a list of blocks, found {shown(content)}", param="messages"
        )
    return content


def _text(where: str, block: Mapping[str, Any], key: str = "text") -> str:
    if not isinstance(block.get(key), str):
        raise ApiError(f"{where}.content: {key}: expected text, found {shown(block.get(key))}", param="messages")
    return str(block[key])


def _skip(where: str, block: Mapping[str, Any]) -> None:
    """Leave a block out, or refuse it if the answer would visibly be another.

    Raises:
        ApiError: it is of a medium that is not read.
    """
    if block["type"] in _MEDIA:
        raise ApiError(f"{where}.content: minillm reads text only, found {shown(block['type'])}", param="messages")
    log_skipped(PATH, "blocks", block["type"][:100])


def _texts(where: str, content: Any) -> str:
    """The texts of blocks as one."""
    texts = []
    for block in _blocks(where, content):
        if block["type"] == "text":
            texts.append(_text(where, block))
        else:
            _skip(where, block)
    return "\n".join(texts)


def _user(where: str, role: str, content: Any) -> list[dict[str, Any]]:
    """Results of tools, and then the text, as messages."""
    results, rest = [], []
    for block in _blocks(where, content):
        if block["type"] != "tool_result":
            rest.append(block)
            continue
        said = block.get("content")
        text = "" if said is None else _texts(where, said)
        results.append({"role": "tool", "tool_call_id": _text(where, block, "tool_use_id"), "content": text})
    text = _texts(where, rest)
    return [*results, {"role": role, "content": text}] if text or not results else results


def _assistant(where: str, content: Any) -> dict[str, Any]:
    """The assistant's text, thoughts and calls as one message."""
    texts, thoughts, calls = [], [], []
    for block in _blocks(where, content):
        kind = block["type"]
        if kind == "text":
            texts.append(_text(where, block))
        elif kind == "thinking":
            thoughts.append(_text(where, block, "thinking"))
        elif kind == "tool_use":
            function = {"name": _text(where, block, "name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": _text(where, block, "id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            _skip(where, block)
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _tools(tools: list[Any] | None) -> list[Any] | None:
    """Definitions of functions in OpenAI's form."""
    if tools is None:
        return None
    functions = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ApiError(f"tools[{i}]: expected a tool, found {shown(tool)}", param="tools")
        if tool.get("type") not in (None, "custom"):
            log_skipped(PATH, "tools", str(tool["type"])[:100])
            continue
        definition = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
        definition |= {"parameters": tool["input_schema"]} if tool.get("input_schema") is not None else {}
        functions.append({"type": "function", "function": definition})
    return functions


def _choice(choice: Mapping[str, Any] | None) -> Any:
    """`tool_choice` in OpenAI's form."""
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    known = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in known:
        raise ApiError(f'tool_choice.type={shown(kind)}: expected "auto", "any", "tool" or "none"', param="tool_choice")
    return known[kind]


# --- answering --------------------------------------------------------------------------------------------------------


class _Answer(AnswerWriter):
    """The message; as a stream its beginning, how its blocks grow, and its end."""

    def __init__(self, request: ServerRequest[ChatRequest]) -> None:
        self._request = request
        self._parser = request.parser()
        self._id = f"msg_{new_id()}"
        self._blocks: list[dict[str, Any]] = []
        self._open = False
        """The last block may grow"""
        self._last: Event | Completion | None = None

    silence = b'event: ping\ndata: {"type":"ping"}\n\n'

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The message in one object."""
        self._last = completion
        for _ in self._read([*self._parser.push(completion.text), *self._parser.finish(cut=is_cut(completion))]):
            pass
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = arguments_of(block["input"])
        return self._message(self._blocks, **self._ending())

    def begin(self) -> bytes:
        """The first event."""
        return self._written([{"type": "message_start", "message": self._message([])}])

    def write(self, prompt: int, event: Event) -> bytes:
        """The events that an event of the engine adds."""
        self._last = event
        deltas = self._parser.push(event.text)
        if event.finish_reason is not None:
            deltas += self._parser.finish(cut=is_cut(event))
        return self._written(self._read(deltas))

    def end(self) -> bytes:
        """The end of the last block, and of the message."""
        delta = {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        return self._written([*self._close(), delta, {"type": "message_stop"}])

    def failed(self, error: ApiError) -> bytes:
        """The last event of a message that failed."""
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def _read(self, deltas: Iterable[AnswerDelta]) -> Iterable[dict[str, Any]]:
        for delta in deltas:
            if isinstance(delta, CallBegin):
                call = {"type": "tool_use", "id": delta.id, "name": delta.name}
                yield from self._begin(call | {"input": ""}, call | {"input": {}})
            elif isinstance(delta, ArgumentsDelta):
                yield self._grow("input", delta.text, {"type": "input_json_delta", "partial_json": delta.text})
            elif isinstance(delta, ReasoningDelta):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._begin_once(block)
                yield self._grow("thinking", delta.text, {"type": "thinking_delta", "thinking": delta.text})
            else:
                yield from self._begin_once({"type": "text", "text": ""})
                yield self._grow("text", delta.text, {"type": "text_delta", "text": delta.text})

    def _begin_once(self, block: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """Begin a block, unless one of its type is open."""
        if not (self._open and self._blocks[-1]["type"] == block["type"]):
            yield from self._begin(block, dict(block))

    def _begin(self, block: dict[str, Any], shown_block: dict[str, Any]) -> Iterable[dict[str, Any]]:
        yield from self._close()
        self._blocks.append(block)
        self._open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": shown_block}

    def _grow(self, key: str, text: str, delta: dict[str, Any]) -> dict[str, Any]:
        self._blocks[-1][key] += text
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterable[dict[str, Any]]:
        """End the last block, if it is open."""
        if self._open:
            self._open = False
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _ending(self) -> dict[str, Any]:
        """Why the message ended."""
        assert self._last is not None
        reason, stop = self._last.finish_reason, self._last.stop_reason
        sequence = stop if isinstance(stop, str) and reason == "stop" else None
        if reason != "stop":
            cap, count = self._request.asked.fields.get("max_new_tokens"), self._request.usage().completion_tokens
            full = reason == "length" and cap is not None and count < cap
            why = "model_context_window_exceeded" if full else "max_tokens"
        elif self._parser.called:
            why = "tool_use"
        else:
            why = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": why, "stop_sequence": sequence}

    def _message(self, content: list[dict[str, Any]], **ending: Any) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._request.model.name}
        return {
            **head,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            **ending,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Counts, those of the prefix cache apart."""
        usage = self._request.usage()
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": usage.cached_tokens}
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            **cached,
            "output_tokens": usage.completion_tokens,
        }

    @staticmethod
    def _written(events: Iterable[dict[str, Any]]) -> bytes:
        """Events as server-sent events."""
        return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event)) for event in events)
