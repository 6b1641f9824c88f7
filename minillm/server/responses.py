"""/v1/responses: text and calls of functions by OpenAI's Responses API.

Source: OpenAI's API reference, "Responses", with its streaming events. Nothing is stored, so `previous_response_id`,
`conversation` and references to items are refused: give the whole conversation as `input`. A function is `strict` only
if it says so. Tools of other types, and what other servers' tools have left in the input, are skipped, with a line in
the log for each type. Generation fields of the engine are taken as in /v1/chat/completions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..decoding import foreign
from ..decoding.event import Event
from ..engine.results import Completion
from ..errors import listed, shown
from ..text.chat import AnswerParser
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
from .logprobs import chat_logprobs
from .messages import ROLES, TEXT_PARTS, custom_call, is_text, log_skipped, read_parts
from .server_request import ServerRequest
from .state import Server
from .streaming import AnswerWriter, StreamResponse

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that adds something here"""
INCLUDED = frozenset(
    {"reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"}
    | {"web_search_call.action.sources", "code_interpreter_call.outputs", "message.input_image.image_url"}
    | {"computer_call_output.output.image_url"}
)
"""Values of `include` about items that no response has here"""

SKIPPED = frozenset(
    {"compaction", "compaction_trigger", "configuration_update", "additional_tools", "program"}
    | {"file_search_call", "web_search_call", "image_generation_call", "code_interpreter_call", "computer_call"}
    | {"computer_call_output", "tool_search_call", "tool_search_output", "local_shell_call", "local_shell_call_output"}
    | {"shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output", "program_output"}
    | {"mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call"}
)
"""Types of items that belong to tools and contexts of other servers"""


class ResponsesRequest(GenerationRequest, kw_only=True):
    """/v1/responses."""

    input: Any
    """A text, or a list of messages, calls and their results"""
    instructions: str | None = None
    max_output_tokens: Any = None
    text: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    """Given back with the response"""
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    """`effort` is a variable of the template, if it uses it"""


RESPONSES = Endpoint(ResponsesRequest, foreign.RESPONSES, NAMES | {"max_new_tokens": "max_output_tokens"})


async def responses(http: Request) -> Response:
    """Answer POST /v1/responses."""
    server = Server.of(http)
    asked, given = _read(await server.read_json(http))
    request = ServerRequest(server, await server.take(http, given.model), asked, "resp", http)
    request.id = f"resp_{new_id()}"
    use = request.tool_use()
    await request.submit(partial(request.render, use), 1, None)
    answer = _Answer(request, given)
    if given.stream:
        return StreamResponse(request, answer)
    [generation] = await request.results()
    return json_response(answer.whole(generation.completions[0]))


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(body: dict[str, Any]) -> tuple[Translated[ChatRequest], ResponsesRequest]:
    """A request as the chat that it stands for, and as it is.

    Raises:
        ApiError: a field is unknown, not offered, or malformed.
    """
    asked = translate(body, RESPONSES)
    given = asked.body
    if given.metadata is not None and len(given.metadata) > 16:
        raise ApiError("metadata: expected at most 16 pairs", param="metadata")
    fields, names = asked.fields, asked.names
    if given.max_output_tokens is not None:
        fields["max_new_tokens"] = given.max_output_tokens
    for what in given.include or ():
        if what == LOGPROBS:
            fields.setdefault("logprobs", True)
        elif what not in INCLUDED:
            raise ApiError(f"include={shown(what)}: expected {listed([LOGPROBS, *sorted(INCLUDED)])}", param="include")
    effort, verbosity = (given.reasoning or {}).get("effort"), (given.text or {}).get("verbosity")
    chat = ChatRequest(
        messages=_messages(given),
        tools=_tools(given.tools),
        tool_choice=_tool_choice(given.tool_choice),
        parallel_tool_calls=given.parallel_tool_calls,
        response_format=_format(given.text),
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
        priority=given.priority,
        timeout=given.timeout,
        reasoning_effort=effort if isinstance(effort, str) else None,
        verbosity=verbosity if isinstance(verbosity, str) else None,
    )
    try:
        convert_chat(chat, fields, names, "text.format", "text.format")
    except ApiError as error:
        raise ApiError(str(error), param="text.format") from None
    return replace(asked, body=chat), given  # type: ignore[arg-type, return-value]


def _messages(given: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation: instructions, and the items of the input."""
    chat: list[dict[str, Any]] = []
    if given.instructions is not None:
        chat.append({"role": "system", "content": given.instructions})
    items = [{"role": "user", "content": given.input}] if isinstance(given.input, str) else given.input
    if not isinstance(items, list) or not items:
        raise ApiError("input: expected a text, or a list of messages, calls and their results", param="input")
    thoughts = ""
    for i, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "reasoning":
            thoughts = _thoughts(item)
            continue
        known = len(chat)
        _append(chat, f"input[{i}]", item)
        if thoughts and len(chat) > known and chat[-1]["role"] == "assistant":
            chat[-1]["reasoning_content"] = thoughts  # they belong to the message, or the calls, after them
        thoughts = ""
    return chat


def _thoughts(item: Mapping[str, Any]) -> str:
    """The text of an item of reasoning; of one without, its summary's."""
    for name in ("content", "summary"):
        parts = item.get(name)
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if any(texts):
            return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def _append(chat: list[dict[str, Any]], where: str, item: Any) -> None:
    """Append an item of the input."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        if item.get("role") not in ROLES:
            raise ApiError(f"{where}.role: expected {listed(ROLES)}, found {shown(item.get('role'))}", param="input")
        content = item.get("content")
        if content is None and item["role"] == "assistant":
            content = ""
        chat.append({"role": item["role"], "content": _content(where, content)})
    elif kind in ("function_call", "custom_tool_call"):
        _append_call(chat, where, item)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        content = _content(where, item.get("output"))
        chat.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif isinstance(kind, str) and kind in SKIPPED:
        log_skipped("/v1/responses", "items", kind)
    elif kind != "item_reference" or not str(item.get("id")).startswith("rs_"):  # of thoughts, no text is missed
        expected = "expected a message, a function_call or a function_call_output"
        advice = ": nothing is stored: send the item itself" if kind == "item_reference" else ""
        raise ApiError(f"{where}: {expected}, found {shown(kind or item)}{advice}", param="input")


def _append_call(chat: list[dict[str, Any]], where: str, item: dict[str, Any]) -> None:
    """Append a call, which belongs to the assistant's message before it."""
    function = {"name": item.get("name"), "arguments": item.get("arguments") or ""}
    if item["type"] == "custom_tool_call":
        function = custom_call(item.get("name"), item.get("input"))
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    for field, value in (("call_id", call["id"]), ("name", function["name"])):
        if not isinstance(value, str):
            raise ApiError(f"{where}.{field}: expected text, found {shown(value)}", param="input")
    if not chat or chat[-1]["role"] != "assistant":
        chat.append({"role": "assistant", "content": ""})
    chat[-1].setdefault("tool_calls", []).append(call)


def _content(where: str, content: Any) -> Any:
    """Text, or its parts in the form of a chat."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where}: expected a text, or its parts, found {shown(content)}", param="input")
    parts = read_parts(content)
    for part in parts:
        if not is_text(part):
            kind = part.get("type") if isinstance(part, dict) else None
            actual = shown(part if kind in (None, *TEXT_PARTS) else kind)
            raise ApiError(f"{where}: expected parts of the type input_text, found {actual}", param="input")
    return parts


def _tools(tools: list[Any] | None) -> list[Any] | None:
    """Definitions of functions in the form of a chat: here they have no object of their own for the function."""
    if tools is None:
        return None
    functions = []
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise ApiError(f"tools[{i}]: expected a tool with its type, found {shown(tool)}", param="tools")
        if kind == "function":
            definition = {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}
            functions.append({"type": kind, "function": definition})
        else:
            log_skipped("/v1/responses", "tools", kind[:100])
    return functions


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        functions = [tool for tool in choice["tools"] if not isinstance(tool, dict) or tool.get("type") == "function"]
        allowed = {"mode": choice.get("mode"), "tools": [{"function": tool} for tool in functions]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _format(text: Mapping[str, Any] | None) -> ResponseFormat | None:
    if text is None:
        return None
    form = text.get("format") or {"type": "text"}
    wrong = text.keys() - {"format", "verbosity"}
    if wrong or not isinstance(form, dict) or not isinstance(form.get("type"), str):
        actual = shown(min(wrong) if wrong else form)
        raise ApiError(f'text: expected {{"format": {{"type": ...}}}}, found {actual}', param="text")
    schema = {key: value for key, value in form.items() if key != "type"}
    return ResponseFormat(form["type"], schema or None)


# --- answering --------------------------------------------------------------------------------------------------------


class _Output:
    """The items of a response, and the events that report how they grow."""

    def __init__(self, parser: AnswerParser) -> None:
        self.items: list[dict[str, Any]] = []
        self._parser = parser
        self._logprobs: list[Any] = []  # of text that has not been reported yet

    def add(self, text: str, logprobs: list[Any]) -> list[dict[str, Any]]:
        """Add generated text with its log-probabilities; returns what is new."""
        deltas = self._parser.push(text)
        if not (deltas and all(isinstance(delta, ReasoningDelta) for delta in deltas)):  # thoughts are given without
            self._logprobs += logprobs
        return [*self._read(deltas)]

    def finish(self, status: str) -> list[dict[str, Any]]:
        """End the last item with this status; returns what is new."""
        events = [*self._read(self._parser.finish(cut=status != "completed"))]
        if not self.items:
            events += self._begin_text()
        return [*events, *self._end(status)]

    def _read(self, deltas: Iterable[AnswerDelta]) -> Iterable[dict[str, Any]]:
        for delta in deltas:
            if isinstance(delta, CallBegin):
                yield from self._end()
                item = {"type": "function_call", "id": f"fc_{new_id()}", "status": "in_progress"}
                item |= {"call_id": delta.id, "name": delta.name, "arguments": ""}
                yield from self._begin(item)
            elif isinstance(delta, ArgumentsDelta):
                self.items[-1]["arguments"] += delta.text
                yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": delta.text}
            elif isinstance(delta, ReasoningDelta):
                if not self.items:
                    yield from self._begin_thoughts()
                self.items[-1]["content"][0]["text"] += delta.text
                place = {**self._place(), "content_index": 0}
                yield {"type": "response.reasoning_text.delta", **place, "delta": delta.text}
            else:
                if not self.items or self.items[-1]["type"] != "message":
                    yield from self._end()
                    yield from self._begin_text()
                part = self.items[-1]["content"][0]
                part["text"] += delta.text
                part["logprobs"] += self._logprobs
                new = {"delta": delta.text, "logprobs": self._logprobs}
                yield {"type": "response.output_text.delta", **self._place(), "content_index": 0, **new}
                self._logprobs = []

    def _begin(self, item: dict[str, Any]) -> Iterable[dict[str, Any]]:
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": _copy(item)}

    def _begin_text(self) -> Iterable[dict[str, Any]]:
        item = {"type": "message", "id": f"msg_{new_id()}", "status": "in_progress", "role": "assistant"}
        yield from self._begin(item | {"content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": _copy(part)}
        self.items[-1]["content"].append(part)

    def _begin_thoughts(self) -> Iterable[dict[str, Any]]:
        item = {"type": "reasoning", "id": f"rs_{new_id()}", "status": "in_progress", "summary": []}
        yield from self._begin(item | {"content": []})
        part = {"type": "reasoning_text", "text": ""}
        yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": _copy(part)}
        self.items[-1]["content"].append(part)

    def _end(self, status: str = "completed") -> Iterable[dict[str, Any]]:
        """End the last item, if one is unfinished."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return
        item, place = self.items[-1], self._place()
        if item["type"] == "message":
            [part] = item["content"]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield {"type": "response.output_text.done", **place, "content_index": 0, **done}
            yield {"type": "response.content_part.done", **place, "content_index": 0, "part": _copy(part)}
        elif item["type"] == "reasoning":
            [part] = item["content"]
            yield {"type": "response.reasoning_text.done", **place, "content_index": 0, "text": part["text"]}
            yield {"type": "response.content_part.done", **place, "content_index": 0, "part": _copy(part)}
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **place, **done}
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": place["output_index"], "item": _copy(item)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _copy(value: dict[str, Any]) -> dict[str, Any]:
    """A copy of an item or a part; both grow on."""
    return {key: [*field] if isinstance(field, list) else field for key, field in value.items()}


class _Answer(AnswerWriter):
    """The response object; as a stream what is new of its items, between the response at its beginning and its end."""

    def __init__(self, request: ServerRequest[ChatRequest], given: ResponsesRequest) -> None:
        """Args:
        request: the chat that is answered
        given: the request as it came
        """
        self._request = request
        self._output = _Output(request.parser())
        self._reason: str | None = None
        self._events = 0
        fields = request.asked.fields
        own = {name: value for name, value in request.model.engine.generation_defaults.items() if value is not None}
        defaults = {"temperature": 1.0, "top_p": 1.0} | own
        self._constant = {
            "id": request.id,
            "object": "response",
            "created_at": request.created,
            "model": request.model.name,
            "background": False,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata or {},
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (given.reasoning or {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": fields.get("temperature", defaults["temperature"]) if fields.get("do_sample", True) else 0.0,
            "text": given.text or {"format": {"type": "text"}},
            "tool_choice": given.tool_choice or "auto",
            "tools": given.tools or [],
            "top_logprobs": fields.get("top_logprobs", 0),
            "top_p": fields.get("top_p", defaults["top_p"]),
            "truncation": "disabled",
            "user": given.user,
        }

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The response in one object."""
        self._reason = completion.finish_reason
        thinking = self._request.usage().reasoning_tokens
        self._output.add(completion.text, self._logprobs(completion)[thinking:])
        self._output.finish(self._status)
        return self._ended()

    def begin(self) -> bytes:
        """The first events."""
        response = self._response("in_progress", [])
        return self._written({"type": f"response.{name}", "response": response} for name in ("created", "in_progress"))

    def write(self, prompt: int, event: Event) -> bytes:
        """The bytes that an event of the engine adds to the items."""
        self._reason = event.finish_reason or self._reason
        return self._written(self._output.add(event.text, self._logprobs(event)))

    def end(self) -> bytes:
        """The end of the last item, and of the response."""
        new = self._output.finish(self._status)
        return self._written([*new, {"type": f"response.{self._status}", "response": self._ended()}])

    def failed(self, error: ApiError) -> bytes:
        """The last event of a response that failed."""
        failure = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": str(error)}
        response = self._response("failed", self._output.items, error=failure)
        return self._written([{"type": "response.failed", "response": response}])

    @property
    def _status(self) -> str:
        return "completed" if self._reason == "stop" else "incomplete"

    def _ended(self) -> dict[str, Any]:
        details = {"reason": "max_output_tokens" if self._reason == "length" else self._reason}
        incomplete = details if self._status == "incomplete" else None
        return self._response(self._status, self._output.items, incomplete_details=incomplete)

    def _response(self, status: str, items: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        usage = None if status == "in_progress" else self._usage()
        state = {"status": status, "error": None, "incomplete_details": None, "output": items, "usage": usage}
        return self._constant | state | more

    def _usage(self) -> dict[str, Any]:
        usage = self._request.usage()
        cached = usage.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": usage.prompt_tokens - cached},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }

    def _written(self, events: Iterable[dict[str, Any]]) -> bytes:
        """Events as server-sent events."""
        lines = []
        for event in events:
            data = encode(event | {"sequence_number": self._events})
            lines.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data))
            self._events += 1
        return b"".join(lines)

    def _logprobs(self, piece: Completion | Event) -> list[Any]:
        return chat_logprobs(self._request.model.texts, piece) if piece.logprobs else []
