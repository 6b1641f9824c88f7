"""Conversations as prompts: messages, checked, and the checkpoint's chat template, which formats them as one text.

The text is the same as that of transformers' `apply_chat_template`. As there, special tokens spelled out in a message
become those tokens: check untrusted input for them first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ...errors import CheckpointError, ParameterError, PromptError, listed, shown
from .calls import CallFormat, format_of, unread_format
from .reasoning import ReasoningFormat, reasoning_format_of
from .tools import described, plain, read_tool_calls, read_tools

Message = Mapping[str, Any]
Messages = Iterable[Message]
"""`{"role": ..., "content": ...}` each, oldest first; calls of tools and their results as in `tools`."""

FORM = '{"role": ..., "content": ...}'

_OLD_ROLES = {"function", "ipython"}
_ALWAYS = {"role", "content", "tool_call_id"}
"""Keys of a message that may be there whether the template reads them or not"""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning text. transformers passes it to the template under the first two names."""

_MARK = "MINILLM_CONTINUES_HERE "
"""Marker appended to a message to be continued. It ends in a space, which templates that trim messages remove."""

RENDER_ARGUMENTS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
"""Arguments of `ChatTemplate.render` besides the messages"""

OWN_VARIABLES = {"messages", "tools", "add_generation_prompt"}
"""Variables of a template that arguments of `ChatTemplate.render` set"""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template, compiled on first use."""

    source: str
    origin: str = "the chat template"
    """Its source, for error messages"""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts of "bos_token", "eos_token" etc., available to the template"""
    tool_use: str | None = None
    """Source of the checkpoint's other template, if it has one for conversations with tools"""

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation in the model's prompt format, special tokens spelled out.

        Args:
            messages: the conversation
            tools: functions that the model may call: see `tools`. A template that knows no tools gets them as text
            add_generation_prompt: end with the prefix of an answer; by default unless the last message is continued
            continue_final_message: leave the last message open, as if unfinished
            chat_template_kwargs: further variables for the template

        Raises:
            PromptError: the messages are malformed, or the template refuses or cannot write them.
            ParameterError: the arguments contradict each other, or the template does not use a variable.
            CheckpointError: the template is not valid Jinja, or violates the sandbox.
        """
        if tools is not None and self.for_tools is not self:
            return self.for_tools.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
        begins = _begins_answer(add_generation_prompt, continue_final_message)
        offered = None if tools is None else read_tools(tools)
        knows_tools = "tools" in self.variables
        chat = read_messages(messages, self.names, with_calls=not knows_tools)
        if not knows_tools:
            chat = described(chat, offered or [])
        if continue_final_message:
            _mark_end(chat[-1])
        given = self._checked({} if chat_template_kwargs is None else chat_template_kwargs)
        own = {"messages": chat, "tools": offered, "add_generation_prompt": begins}
        text: str = self._ask({"documents": None, **self.special_tokens, **own, **given})["text"]
        return _cut_at_mark(text) if continue_final_message else text

    @property
    def names(self) -> frozenset[str]:
        """Keys and texts that the template's source spells out, such as "text" if it reads parts of a content.

        Raises:
            CheckpointError: as `render`.
        """
        return self._uses["names"]

    @property
    def variables(self) -> frozenset[str]:
        """Names of the template's free variables.

        Raises:
            CheckpointError: as `render`.
        """
        return self._uses["variables"]

    @cached_property
    def for_tools(self) -> "ChatTemplate":
        """The template of conversations with tools: this one, unless the checkpoint has another for them."""
        return self if self.tool_use is None else replace(self, source=self.tool_use, tool_use=None)

    @cached_property
    def call_format(self) -> CallFormat | None:
        """The form in which a model with this template writes tool calls; None if minillm does not read it."""
        return format_of(self._tools_source)

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The form of the thoughts of a model with this template; None if it has none."""
        return reasoning_format_of(self.source)

    @property
    def unread_calls(self) -> str | None:
        """The name of that form, if minillm does not read it."""
        return unread_format(self._tools_source)

    @property
    def _tools_source(self) -> str:
        return self.for_tools.source if "tools" in self.for_tools.variables else ""

    @cached_property
    def _uses(self) -> dict[str, frozenset[str]]:
        """The "variables" and "names" of the source."""
        return {kind: frozenset(words) for kind, words in self._ask(None).items()}

    def _checked(self, variables: Any) -> dict[str, Any]:
        """The user's variables as plain values; the template must use all of them."""
        if not isinstance(variables, Mapping):
            raise ParameterError(f"chat_template_kwargs should be a dict of variables, found {shown(variables)}")
        refuse_documents(variables)
        for name in variables:
            if name in OWN_VARIABLES:
                raise ParameterError(
                    f"chat_template_kwargs: {name} is an argument of the call, not a template variable"
                )
            if name not in self.variables:
                known = listed(sorted(self.variables - OWN_VARIABLES - {"documents"})) or "none"
                raise ParameterError(
                    f"chat_template_kwargs: the template does not use {shown(name)}; its variables: {known}"
                )
        try:
            return {name: plain(value) for name, value in variables.items()}
        except (TypeError, ValueError, RecursionError) as error:
            raise ParameterError(f"chat_template_kwargs should hold only JSON values: {error!s:.100}") from None

    def _ask(self, variables: Mapping[str, Any] | None) -> dict[str, Any]:
        """Have the template rendered, or inspected without variables.

        Raises:
            PromptError: the template refuses the messages, or fails on them.
            CheckpointError: it is not valid Jinja, does something forbidden, or too much.
        """
        from .renderer import RENDERER, StoppedError

        try:
            answer = RENDERER.ask(self.source, variables)
        except StoppedError as error:
            raise CheckpointError(f"{self.origin} was stopped: {error}") from None
        if "error" not in answer:
            return answer
        message = _one_line(answer["message"])
        match answer["error"]:
            case "syntax":
                line = "" if answer["line"] is None else f", line {answer['line']}"
                raise CheckpointError(f"{self.origin}{line}: not a valid Jinja template: {message}")
            case "refusal":
                raise PromptError(f"{self.origin} refuses the messages: {message}")
            case "security":
                raise CheckpointError(f"{self.origin} was refused by the sandbox: {message}")
            case "limit":
                raise CheckpointError(f"{self.origin} was stopped: {message}")
        raise PromptError(f"{self.origin} fails on these messages: {message}")


def _begins_answer(add_generation_prompt: object, continue_final_message: object) -> bool:
    """True if the text ends with the prefix of an answer."""
    if not isinstance(continue_final_message, bool):
        raise ParameterError(f"continue_final_message should be True or False, found {shown(continue_final_message)}")
    if add_generation_prompt is None:
        return not continue_final_message
    if not isinstance(add_generation_prompt, bool):
        raise ParameterError(f"add_generation_prompt should be True or False, found {shown(add_generation_prompt)}")
    if add_generation_prompt and continue_final_message:
        raise ParameterError(
            "add_generation_prompt starts a new message, continue_final_message continues the last one: "
            "leave one of them out"
        )
    return add_generation_prompt


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= 300 else line[:300] + " ..."


def _mark_end(message: dict[str, Any]) -> None:
    """Append the mark to the message's text, or to its last part."""
    if isinstance(message["content"], str):
        message["content"] += _MARK
    elif message["content"]:
        message["content"][-1]["text"] += _MARK


def _cut_at_mark(text: str) -> str:
    """The text before the mark, stripped at the end if the template trims messages."""
    count = text.count(_MARK.rstrip())
    if count != 1:
        how = "leaves out the end of the last message" if count == 0 else "writes the last message more than once"
        raise PromptError(f"the chat template {how}: it cannot be continued")
    end = text.index(_MARK.rstrip())
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()


# --- messages ---------------------------------------------------------------------------------------------------------


def refuse_documents(fields: Mapping[str, Any]) -> None:
    """Refuse an argument of transformers' `apply_chat_template` that minillm does not offer.

    Raises:
        ParameterError: `documents` is given.
    """
    if "documents" in fields:
        raise ParameterError("documents: minillm does not pass them to chat templates: put their text into a message")


def read_messages(messages: Any, names: frozenset[str], *, with_calls: bool = False) -> list[dict[str, Any]]:
    """Check a conversation and copy it into plain types, which have no methods that a template could misuse.

    As in transformers, a key with the value None counts as absent.

    Args:
        messages: the conversation, `Messages`
        names: keys and texts that the template's source spells out. Beside role and content, a message may have only
            keys among them: another could have no effect
        with_calls: take calls and names of results too if the template does not read them, for `described`

    Raises:
        PromptError: it is not a list of messages, is empty, or a message does not have the form above.
    """
    if isinstance(messages, str):
        raise PromptError(f"messages should be a list of {FORM}, found text: use `generate` to continue plain text")
    if isinstance(messages, Mapping):
        raise PromptError(f"messages should be a list of {FORM}, found a single message: put it into a list")
    if not isinstance(messages, Iterable) or getattr(messages, "ndim", 1) == 0:  # a 0-d array
        raise PromptError(f"messages should be a list of {FORM}, found {type(messages).__name__}")
    if with_calls:
        names |= {"tool_calls"}
    chat = [_read_message(f"messages[{i}]", message, names) for i, message in enumerate(messages)]
    if not chat:
        raise PromptError("messages is empty: expected at least one message")
    return chat


def _read_message(where: str, message: Any, names: frozenset[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f"{where} should be {FORM}, found {type(message).__name__}")
    given = {key: value for key, value in message.items() if value is not None}
    _check_role(where, given)
    if given.get("tool_calls"):
        if given["role"] != "assistant":
            raise PromptError(f"{where}: tool_calls belongs to the role 'assistant', found {shown(given['role'])}")
        given = {"content": ""} | given | {"tool_calls": read_tool_calls(where, given["tool_calls"])}
    else:
        given.pop("tool_calls", None)  # some clients send an empty list
    if "content" not in given:
        raise PromptError(f'{where} has no content: give its text, which may be ""')
    _check_content(where, given["content"], names)
    for key in unread_keys(given, names):
        raise PromptError(f"{where}: {shown(key)} has no effect, since the chat template does not use it: leave it out")
    reasoning = next((given[key] for key in REASONING_KEYS if key in given), None)
    if reasoning is not None:
        given = {"thinking": reasoning} | given | {"reasoning_content": reasoning}
    try:
        copy: dict[str, Any] = plain(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"{where} should hold only JSON values: {error!s:.100}") from None
    return copy


def unread_keys(message: Message, names: frozenset[str]) -> list[str]:
    """The keys of a message without effect: those that neither every conversation nor this template reads.

    Args:
        message: with its role
        names: keys and texts that the template's source spells out
    """
    known = _ALWAYS | {"name"} if message.get("role") == "tool" else _ALWAYS - {"tool_call_id"}
    return [
        key
        for key in message
        if key not in known and not names.intersection(REASONING_KEYS if key in REASONING_KEYS else (key,))
    ]


def _check_role(where: str, message: Message) -> None:
    if "role" not in message:
        raise PromptError(f'{where} has no role: expected "user", "assistant" or, with most templates, "system"')
    role = message["role"]
    if not isinstance(role, str):
        raise PromptError(f"{where}: role should be text, found {shown(role)}")
    if role in _OLD_ROLES:
        raise PromptError(f"{where}: the role {role!r} is not supported: give a tool's result in the role 'tool'")
    if "function_call" in message:
        raise PromptError(f"{where}: 'function_call' is not supported: give calls as tool_calls")
    for key in sorted({"tool_call_id", "name"} & message.keys()):
        if role == "tool" and not isinstance(message[key], str):
            raise PromptError(f"{where}: {key} should be text, found {shown(message[key])}")


def _check_content(where: str, content: Any, names: frozenset[str]) -> None:
    """Check that content is text, or text parts if the template reads parts; others would print them as a list."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise PromptError(f"{where}: content should be text or a list of text parts, found {type(content).__name__}")
    for part in content:
        if not isinstance(part, Mapping) or "type" not in part:
            raise PromptError(
                f'{where}: a part of content should be {{"type": "text", "text": ...}}, found {shown(part)}'
            )
        if not isinstance(part["type"], str) or part["type"] != "text":
            raise PromptError(f"{where}: content has a part of type {shown(part['type'])}: minillm accepts text only")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise PromptError(
                f'{where}: a part of content should be {{"type": "text", "text": ...}}, found {shown(part)}'
            )
    if "text" not in names:
        raise PromptError(f"{where}: the chat template expects content as one text, not a list of parts: join them")
