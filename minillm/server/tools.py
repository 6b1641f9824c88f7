"""Tools of a chat: which are offered, whether they must be called, and the calls in the answer.

Source: OpenAI's API reference, chat completions: `tools`, `tool_choice`, `parallel_tool_calls`, `strict`. A required
call is made certain by a grammar, so are the arguments of a function with `strict`; arguments of others are what the
model writes, and in a required call they fit as much of the schema as a grammar can hold.

If `max_tokens` or a stop string ends an answer within a call, content is the text before the call. The call is reported
if its name and the beginning of its arguments are there, with the arguments so far and the finish_reason "length"; a
shorter one is left out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..decoding.event import Event
from ..decoding.fields import GUIDES
from ..engine.results import Completion
from ..errors import listed, shown
from ..text.chat import FORMATS, Answer, AnswerParser, CallFormat, CallParser, call_grammar, parser_of, read_tools
from ..text.chat.calls import AnswerDelta, ArgumentsDelta, CallBegin, ReasoningDelta
from ..text.chat.harmony import HarmonyParser
from .generation_request import Translated
from .http_json import ApiError
from .served_model import ServedModel

_CHOICES = (
    '"none", "auto", "required", {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}'
)
_FORMS = ("response_format", "text.format")
"""Names under which clients send the form of content"""


@dataclass(frozen=True)
class ToolUse:
    """The tools that a request offers its model, and how calls are read."""

    offered: list[dict[str, Any]]
    """Definitions for the template"""
    form: CallFormat
    names: frozenset[str]
    """Names of the functions that may be called"""
    single: bool
    """One call at most"""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of the functions' parameters"""

    def parser(self) -> CallParser | HarmonyParser:
        """A parser for one answer."""
        return parser_of(self.form, self.names, single=self.single, schemas=self.schemas)


class FirstCalls:
    """Ends each of a request's answers with its first call."""

    def __init__(self, parsers: Sequence[AnswerParser]) -> None:
        """`parsers`: one for each answer."""
        self._parsers = parsers
        self._ended: set[int] = set()

    @property
    def all_ended(self) -> bool:
        """True if each answer has its call, or ended without; what is generated further is not wanted."""
        return len(self._ended) == len(self._parsers)

    def until_complete(self, events: Sequence[tuple[int, Event]]) -> list[tuple[int, Event]]:
        """The events, up to that which completes its answer's call and becomes its last one.

        `events` are those of single steps: the engine may be some steps ahead, and how many depends on the clock.
        """
        until_call: list[tuple[int, Event]] = []
        for prompt, event in events:
            if event.index in self._ended:
                continue
            until_call.append((prompt, event))
            parser = self._parsers[event.index]
            parser.push(event.text)
            if parser.done:
                event.finish_reason, event.stop_reason = "stop", None
            if event.finish_reason is not None:
                self._ended.add(event.index)
                event.request_finished = self.all_ended
        return until_call


def tool_use(asked: Translated[Any], model: ServedModel) -> ToolUse | None:
    """The tools of a request; None if it offers none, or forbids calls. Sets the generation fields that they need.

    Raises:
        ApiError: a definition or the choice is malformed, or contradicts another field.
        ParameterError, CheckpointError: as `read_tools`, and of a broken template.
    """
    body = asked.body
    template = model.engine.chat_template
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise ApiError("tool_choice needs tools: give their definitions", param="tool_choice")
        return None
    tools = read_tools(body.tools)
    mode, names = _choice(body.tool_choice, [tool["function"]["name"] for tool in tools])
    if mode == "none" or template is None:  # without a template the request is refused when it is rendered
        return None
    form = model.tool_parser or template.call_format
    if form is None:
        message = f"minillm does not read the calls that the model's template writes, {template.unread_calls}"
        raise ApiError(f"tools: {message}: start the server with --tool-parser {'|'.join(FORMATS)}", param="tools")
    named = isinstance(body.tool_choice, dict) and body.tool_choice.get("type") == "function"
    single = named or body.parallel_tool_calls is False
    callable_ = [tool for tool in tools if tool["function"]["name"] in names]
    strict = any(tool["function"].get("strict") for tool in callable_)
    tokenizer, required = model.engine.tokenizer, mode == "required"
    guided = required or strict or len(callable_) < len(tools)
    if guided and not form.guides:
        what = "a call required" if required else "a strict function" if strict else "some of the functions alone"
        raise ApiError(
            f"tools: this model's calls are held by no grammar, so {what} cannot be granted: leave that out",
            param="tools",
        )
    # a form of the content holds its final message alone, after the calls that no grammar sees
    content = _content_schema(asked, required=required, guided=guided) if form.guides else None
    if guided or content is not None:
        asked.fields["guided_grammar"] = call_grammar(
            form,
            callable_,
            {} if tokenizer is None else tokenizer.added_ids,
            required=required,
            single=single,
            content=content,
        )
        asked.names["guided_grammar"] = "tools"
    if form.hidden_by(tokenizer):
        if asked.fields.get("skip_special_tokens"):
            message = "this model marks calls by special tokens: leave it out"
            raise ApiError(f"skip_special_tokens: {message}", param="skip_special_tokens")
        asked.fields["skip_special_tokens"] = False
    offered = [_without_strict(tool) for tool in tools]
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    return ToolUse(offered, form, frozenset(names), single, schemas)


def _choice(choice: Any, names: list[str]) -> tuple[str, list[str]]:
    """Whether calls are forbidden ("none"), possible ("auto") or required, and the functions."""
    if choice is None:
        return "auto", names
    if choice in ("none", "auto", "required"):
        return choice, names
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return "required", [_known(choice.get("function"), names)]
    if kind == "allowed_tools" and isinstance(choice.get("allowed_tools"), dict):
        allowed = choice["allowed_tools"]
        tools = allowed.get("tools")
        if allowed.get("mode") in ("auto", "required") and isinstance(tools, list) and tools:
            functions = [tool.get("function") if isinstance(tool, dict) else None for tool in tools]
            return allowed["mode"], [_known(function, names) for function in functions]
    raise ApiError(f"tool_choice={shown(choice)}: expected {_CHOICES}", param="tool_choice")


def _known(function: Any, names: list[str]) -> str:
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise ApiError(f"tool_choice: there is no tool {shown(name)}; there is {listed(names)}", param="tool_choice")
    return str(name)


def _content_schema(asked: Translated[Any], *, required: bool, guided: bool) -> Mapping[str, Any] | None:
    """The JSON schema of an answer's content, which becomes part of the grammar of calls.

    Another guide of the user's is about the whole text, calls included; it stays unless a grammar must hold the calls.
    """
    if required and asked.names.get("guided_json") in _FORMS:  # it is about the final answer, not about calls
        asked.fields.pop("guided_json", None)
    for name in GUIDES:
        if asked.fields.get(name) is not None and (required or (guided and name != "guided_json")):
            given = asked.names.get(name, name)
            what = "calls are required, so there is no content" if required else "calls have a grammar of their own"
            raise ApiError(f"{given} contradicts tools: {what}: leave one of them out", param=given)
    schema = asked.fields.pop("guided_json", None)
    if schema is not None and not isinstance(schema, Mapping):
        raise ApiError("guided_json: with tools, expected a schema as an object", param="guided_json")
    return schema


def _without_strict(tool: dict[str, Any]) -> dict[str, Any]:
    """A definition as models have seen it: `strict` is for the server."""
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return tool | {"function": function}


# --- the answer in OpenAI's form --------------------------------------------------------------------------------------


def message_calls(answer: Answer) -> list[dict[str, Any]]:
    """Calls of a message."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]


def arguments_of(text: str) -> dict[str, Any]:
    """Arguments as an object; text of the model's that is none is the value of an empty key."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"": text}


def delta_of(change: AnswerDelta) -> dict[str, Any]:
    """The "delta" of a chunk."""
    if isinstance(change, ReasoningDelta):
        return thoughts(change.text)
    if isinstance(change, CallBegin):
        function = {"name": change.name, "arguments": ""}
        return {"tool_calls": [{"index": change.index, "id": change.id, "type": "function", "function": function}]}
    if isinstance(change, ArgumentsDelta):
        return {"tool_calls": [{"index": change.index, "function": {"arguments": change.text}}]}
    return {"content": change.text}


def thoughts(text: str) -> dict[str, Any]:
    """Thoughts under the names that clients know, DeepSeek's and OpenRouter's."""
    return {"reasoning_content": text, "reasoning": text}


def is_cut(piece: Completion | Event) -> bool:
    """Whether a limit or a stop string ended the text, rather than the model."""
    return piece.finish_reason != "stop" or isinstance(piece.stop_reason, str)


def ended(reason: str | None, *, called: bool) -> str | None:
    """The finish_reason of an answer."""
    return "tool_calls" if called and reason == "stop" else reason
