r"""Tool calls in a model's text: the formats of published models, and what is read from a text (`call_parser`).

    hermes       <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>     Hermes 2, Hermes 3, Qwen2.5, Qwen3
    llama3       {"name": ..., "parameters": {...}}; {...}                        Llama 3.1, 3.2
    mistral      [TOOL_CALLS] [{"name": ..., "arguments": {...}}, {...}]          Mistral 7B v0.3, Mixtral 8x22B
    mistral-v11  [TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[ARGS]{...}           Mistral Small 3.1 and later
    granite      <|tool_call|>[{"name": ..., "arguments": {...}}, {...}]          Granite 3
    phi4         <|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>   Phi-4-mini
    json         {"name": ..., "arguments": {...}}, or a list of these            any other: see `tools.described`
    harmony      <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>      gpt-oss
    qwen3-coder  <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n...</function>\n</tool_call>
                                                                                 Qwen3-Coder; values are plain text

Text outside of calls is content. In the formats without a marker (llama3, json) an answer is either calls or content,
and only the name of a tool of the request makes an object a call.
"""

import secrets
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

_ID = string.ascii_letters + string.digits


class AddedTokens(Protocol):
    """The part of a tokenizer that matters here."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def added_ids(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class CallFormat:
    """The form in which a family of models writes tool calls."""

    name: str
    begin: str = ""
    """The marker before each call or list of calls; "" if calls stand at the beginning of the answer"""
    end: str = ""
    """The marker after them; a text that leaves it out is read all the same"""
    lists: bool = False
    """True if calls are written as a list, also one alone"""
    separator: str = ""
    """Text between two calls"""
    arguments: str = "arguments"
    """Key of the arguments"""
    args_marker: str = ""
    """Written between name and arguments, instead of an object with both"""
    openings: tuple[str, ...] = ()
    """Texts that may stand before the first call of a format without a marker, and mean nothing"""
    guides: bool = True
    """Whether a grammar can hold calls; False: an answer has further messages, of which a grammar would see one"""
    unmarked: str = ""
    """A call's own beginning, at which it is read also where the model leaves out the marker before it; then calls are
    XML, with values as plain text"""
    short_ids: bool = False
    """True if the model's templates take only ids of nine letters and digits"""

    def hidden_by(self, tokenizer: AddedTokens | None) -> bool:
        """True if some of its markers are special tokens, which decoded text leaves out."""
        markers = {self.begin, self.end, self.args_marker}
        return tokenizer is not None and any(tokenizer.added_ids.get(m) in tokenizer.special_ids for m in markers)

    def new_id(self) -> str:
        """A random id for a call."""
        if self.short_ids:
            return "".join(secrets.choice(_ID) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


FORMATS: dict[str, CallFormat] = {
    form.name: form
    for form in (
        CallFormat("hermes", "<tool_call>", "</tool_call>", separator="\n"),
        CallFormat("llama3", separator="; ", arguments="parameters", openings=("<|python_tag|>",)),
        CallFormat("mistral", "[TOOL_CALLS]", lists=True, short_ids=True),
        CallFormat("mistral-v11", "[TOOL_CALLS]", args_marker="[ARGS]", short_ids=True),
        CallFormat("granite", "<|tool_call|>", lists=True),
        CallFormat("phi4", "<|tool_call|>", "<|/tool_call|>", lists=True),
        CallFormat("qwen3-coder", "<tool_call>", "</tool_call>", separator="\n", unmarked="<function="),
        CallFormat("harmony", "<|channel|>", "<|call|>", args_marker="<|message|>", guides=False),
        CallFormat("json", end="```", separator="\n", openings=("```json", "```")),
    )
}
"""Formats by name"""

_SIGNS = {
    "<|channel|>": "harmony",
    "<parameter=": "qwen3-coder",
    "[ARGS]": "mistral-v11",
    "[TOOL_CALLS]": "mistral",
    "<|/tool_call|>": "phi4",
    "<|tool_call|>": "granite",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3",
    '"parameters": ': "llama3",
}


_UNREAD = {
    "<arg_key>": "the XML of GLM-4.5 and later",
    "<function=": "<function=name>{...}</function>",
}
"""Formats that are not read here, by what a template in them contains"""


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template with tools writes calls in; None if it is one that is not read here."""
    name = next((name for sign, name in _SIGNS.items() if sign in template), "json")
    return FORMATS[name] if name == "qwen3-coder" or unread_format(template) is None else None


def unread_format(template: str) -> str | None:
    """The name of the format of calls that minillm does not read in which a template writes; None if it is none."""
    return next((name for sign, name in _UNREAD.items() if sign in template), None)


# --- what a parser reports --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContentDelta:
    """More text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the thoughts before the answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """The beginning of a call, whose arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of the arguments' JSON text."""

    index: int
    text: str


Delta = ContentDelta | CallBegin | ArgumentsDelta
AnswerDelta = Delta | ReasoningDelta


@dataclass
class ToolCall:
    """A call as a whole."""

    id: str
    name: str
    arguments: str = ""
    """JSON text of an object; whatever the model wrote if that is not JSON, or was cut off"""


@dataclass
class Answer:
    """Thoughts, content and calls of an answer; the sum of a parser's deltas."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""

    def add(self, deltas: Iterable[AnswerDelta]) -> None:
        """Append deltas."""
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self.content += delta.text
            elif isinstance(delta, ReasoningDelta):
                self.reasoning += delta.text
            elif isinstance(delta, CallBegin):
                self.calls.append(ToolCall(delta.id, delta.name))
            else:
                self.calls[delta.index].arguments += delta.text
