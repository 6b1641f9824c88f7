r"""Tool calls in a model's text: the formats of published models, and what is read from a text (`call_parser`).

    hermes       <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>     Hermes 2, Hermes 3, Qwen2.5, Qwen3
    llama3       {"name": ..., "parameters": {...}}; {...}                        Llama 3.1, 3.2
    mistral      [TOOL_CALLS] [{"name": ..., "arguments": {...}}, {...}]          Mistral 7B v0.3, Mixtral 8x22B
    mistral-v11  [TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[ARGS]{...}           Mistral Small 3.1 and later
    granite      <|tool_call|>[{"name": ..., "arguments": {...}}, {...}]          Granite 3
    phi4         <|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>   Phi-4-mini
    json         {"name": ..., "arguments": {...}}, or a list of these            any other: see `tools.described`
    harmony      <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>      gpt-oss
    cohere       <|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}]<|END_ACTION|>
                                                                                 Command R7B, Command A
    deepseek     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
                 <｜tool▁calls▁end｜>                                            DeepSeek-V3.1 and later
    kimi         <|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}
                 <|tool_call_end|><|tool_calls_section_end|>                     Kimi K2

Values are plain text:

    qwen3-coder  <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n...</function>\n</tool_call>
                                                                                 Qwen3-Coder
    seed         <seed:tool_call>\n<function=name>\n...</function>\n</seed:tool_call>      Seed-OSS
    minimax      <minimax:tool_call>\n<invoke name="name">\n<parameter name="key">value</parameter>\n...</invoke>\n
                 </minimax:tool_call>                                            MiniMax-M2
    glm          <tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n...</tool_call>
                                                                                 GLM-4.5 and later

Values are Python's literals, or JSON:

    llama4       [name(key=value, ...), ...]                                     Llama 4, Llama 3.2 1B and 3B
    lfm2         <|tool_call_start|>[name(key=value, ...), ...]<|tool_call_end|>          LFM2

Text outside of calls is content. In the formats without a marker (llama3, llama4, json) an answer is either calls or
content, and only the name of a tool of the request makes an object a call.
"""

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
class CallTags:
    """The tags of a call whose values are plain text, with the white space that templates write."""

    function: tuple[str, str]
    """Before and after the function's name"""
    key: tuple[str, str]
    value: tuple[str, str]
    """Before and after a value"""
    end: str = ""
    """After the last value; "" if the marker after the call stands there"""
    block: bool = False
    """True if all calls of an answer stand between one pair of markers"""


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
    tags: CallTags | None = None
    """Its tags, if calls are XML, with values as plain text"""
    around: tuple[str, str] = ("", "")
    """Written around each call, within `begin` and `end`, where a call is a name, `args_marker` and its arguments"""
    name_key: str = "name"
    """Key of the name"""
    literals: bool = False
    """True if a call is written as Python's, with literals as arguments"""
    short_ids: bool = False
    """True if the model's templates take only ids of nine letters and digits"""
    numbered_ids: bool = False
    """True if an id is written for the name: functions.NAME:NUMBER"""

    def hidden_by(self, tokenizer: AddedTokens | None) -> bool:
        """True if some of its markers are special tokens, which decoded text leaves out."""
        markers = {self.begin, self.end, self.args_marker}
        return tokenizer is not None and any(tokenizer.added_ids.get(m) in tokenizer.special_ids for m in markers)

    @property
    def block(self) -> bool:
        """True if all calls of an answer stand between one pair of markers."""
        return self.lists or bool(self.around[0]) or (self.tags is not None and self.tags.block)

    def new_id(self, name: str = "", index: int = 0) -> str:
        """An id for a call, random unless the form writes it; `index`: of the call in its answer."""
        if self.numbered_ids:
            return f"functions.{name}:{index}"
        import secrets  # here, for it takes 8 ms to import

        if self.short_ids:
            return "".join(secrets.choice(_ID) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


_QWEN = CallTags(("<function=", ">\n"), ("<parameter=", ">"), ("\n", "\n</parameter>"), "</function>")
_MINIMAX = CallTags(
    ('<invoke name="', '">\n'), ('<parameter name="', '">'), ("", "</parameter>"), "</invoke>", block=True
)
_GLM = CallTags(("", "\n"), ("<arg_key>", "</arg_key>\n"), ("<arg_value>", "</arg_value>"))

FORMATS: dict[str, CallFormat] = {
    form.name: form
    for form in (
        CallFormat("hermes", "<tool_call>", "</tool_call>", separator="\n"),
        CallFormat("llama3", separator="; ", arguments="parameters", openings=("<|python_tag|>",)),
        CallFormat("mistral", "[TOOL_CALLS]", lists=True, short_ids=True),
        CallFormat("mistral-v11", "[TOOL_CALLS]", args_marker="[ARGS]", short_ids=True),
        CallFormat("granite", "<|tool_call|>", lists=True),
        CallFormat("phi4", "<|tool_call|>", "<|/tool_call|>", lists=True),
        CallFormat(
            "cohere", "<|START_ACTION|>", "<|END_ACTION|>", lists=True, name_key="tool_name", arguments="parameters"
        ),
        CallFormat(
            "deepseek",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            args_marker="<｜tool▁sep｜>",
            around=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        ),
        CallFormat(
            "kimi",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            args_marker="<|tool_call_argument_begin|>",
            around=("<|tool_call_begin|>", "<|tool_call_end|>"),
            numbered_ids=True,
        ),
        CallFormat("qwen3-coder", "<tool_call>", "</tool_call>", separator="\n", tags=_QWEN),
        CallFormat("seed", "<seed:tool_call>", "</seed:tool_call>", separator="\n", tags=_QWEN),
        CallFormat("minimax", "<minimax:tool_call>", "</minimax:tool_call>", separator="\n", tags=_MINIMAX),
        CallFormat("glm", "<tool_call>", "</tool_call>", separator="\n", tags=_GLM),
        CallFormat("llama4", literals=True, lists=True, openings=("<|python_start|>",)),
        CallFormat("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", literals=True, lists=True),
        CallFormat("harmony", "<|channel|>", "<|call|>", args_marker="<|message|>", guides=False),
        CallFormat("json", end="```", separator="\n", openings=("```json", "```")),
    )
}
"""Formats by name"""

_SIGNS = {
    "<|channel|>": "harmony",
    "<seed:tool_call>": "seed",
    "<minimax:tool_call>": "minimax",
    "<arg_key>": "glm",
    "<｜tool▁calls▁begin｜>": "deepseek",
    "<|tool_calls_section_begin|>": "kimi",
    "<|START_ACTION|>": "cohere",
    "<|tool_call_start|>": "lfm2",
    "[func_name1(": "llama4",
    "<|python_start|>": "llama4",
    "<parameter=": "qwen3-coder",
    "[ARGS]": "mistral-v11",
    "[TOOL_CALLS]": "mistral",
    "<|/tool_call|>": "phi4",
    "<|tool_call|>": "granite",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3",
    '"parameters": ': "llama3",
}


_UNREAD = {"<function=": "<function=name>{...}</function>"}
"""Formats that are not read here, by what a template in them contains"""


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template with tools writes calls in; None if it is one that is not read here."""
    name = next((name for sign, name in _SIGNS.items() if sign in template), "json")
    return FORMATS[name] if FORMATS[name].tags is not None or unread_format(template) is None else None


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
