"""Conversations as prompts: messages, checked, and the checkpoint's chat template, which formats them as one text.

The text is the same as that of transformers' `apply_chat_template`. As there, special tokens spelled out in a message
become those tokens: check untrusted input for them first.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, ParameterError, PromptError, listed, shown

if TYPE_CHECKING:
    from .sandbox import Compiled

Message = Mapping[str, Any]
Messages = Iterable[Message]
"""`{"role": ..., "content": ...}` each, oldest first."""

FORM = '{"role": ..., "content": ...}'
NO_TOOLS = "minillm does not support tools"

_TOOL_ROLES = {"tool", "function", "ipython"}
_TOOL_KEYS = {"tool_calls", "tool_call_id", "function_call"}
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning text. transformers passes it to the template under the first two names."""

_MARK = "MINILLM_CONTINUES_HERE "
"""Marker appended to a message to be continued. It ends in a space, which templates that trim messages remove."""

RENDER_ARGUMENTS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
"""Arguments of `ChatTemplate.render` besides the messages"""

_OWN = {"messages", "add_generation_prompt"}


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template, compiled on first use."""

    source: str
    origin: str = "the chat template"
    """Its source, for error messages"""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts of "bos_token", "eos_token" etc., available to the template"""

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation in the model's prompt format, special tokens spelled out.

        Args:
            messages: the conversation
            add_generation_prompt: end with the prefix of an answer; by default unless the last message is continued
            continue_final_message: leave the last message open, as if unfinished
            chat_template_kwargs: further variables for the template

        Raises:
            PromptError: the messages are malformed, or the template refuses or cannot write them.
            ParameterError: the arguments contradict each other, or the template does not use a variable.
            CheckpointError: the template is not valid Jinja, or violates the sandbox.
        """
        begins = _begins_answer(add_generation_prompt, continue_final_message)
        chat = read_messages(messages, self._compiled.names)
        if continue_final_message:
            _mark_end(chat[-1])
        given = self._checked({} if chat_template_kwargs is None else chat_template_kwargs)
        text = self._write({"messages": chat, "add_generation_prompt": begins, **given})
        return _cut_at_mark(text) if continue_final_message else text

    @cached_property
    def _compiled(self) -> "Compiled":
        from .sandbox import compile_template

        try:
            return compile_template(self.source)
        except Exception as error:  # Jinja's errors, and those of Python's compiler
            number = getattr(error, "lineno", None)
            line = "" if number is None else f", line {number}"
            raise CheckpointError(f"{self.origin}{line}: not a valid Jinja template: {_one_line(error)}") from error

    def _checked(self, variables: Any) -> dict[str, Any]:
        """The user's variables as plain values, all of which the template must use."""
        if not isinstance(variables, Mapping):
            raise ParameterError(f"chat_template_kwargs should be a dict of variables, found {shown(variables)}")
        refuse_tools(variables)
        for name in variables:
            if name in _OWN:
                raise ParameterError(
                    f"chat_template_kwargs: {name} is an argument of the call, not a template variable"
                )
            if name not in self._compiled.variables:
                known = listed(sorted(self._compiled.variables - _OWN - {"tools", "documents"})) or "none"
                raise ParameterError(f"the chat template does not use {shown(name)}; its variables: {known}")
        try:
            return {name: plain(value) for name, value in variables.items()}
        except (TypeError, ValueError, RecursionError) as error:
            raise ParameterError(f"chat_template_kwargs should hold only JSON values: {error!s:.100}") from None

    def _write(self, variables: Mapping[str, Any]) -> str:
        from jinja2.exceptions import SecurityError

        from .sandbox import Refused

        nothing = {"tools": None, "documents": None}
        try:
            return self._compiled.render(nothing | dict(self.special_tokens) | dict(variables))
        except Refused as refusal:
            raise PromptError(f"{self.origin} refuses the messages: {_one_line(refusal)}") from None
        except SecurityError as error:
            raise CheckpointError(f"{self.origin} was refused by the sandbox: {_one_line(error)}") from error
        except Exception as error:  # a template is a program and may raise anything
            raise PromptError(f"{self.origin} fails on these messages: {_one_line(error)}") from error


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


def _one_line(error: Exception) -> str:
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= 300 else line[:300] + " ..."


def _mark_end(message: dict[str, Any]) -> None:
    """Append the mark to the message's text, or to its last part."""
    if isinstance(message["content"], str):
        message["content"] += _MARK
    elif message["content"]:
        message["content"][-1]["text"] += _MARK


def _cut_at_mark(text: str) -> str:
    """The text before the mark, stripped at the end if the template trims messages."""
    found = text.count(_MARK.rstrip())
    if found != 1:
        how = "leaves out the end of the last message" if found == 0 else "writes the last message more than once"
        raise PromptError(f"the chat template {how}: it cannot be continued")
    end = text.index(_MARK.rstrip())
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()


# --- messages ---------------------------------------------------------------------------------------------------------


def refuse_tools(fields: Mapping[str, Any]) -> None:
    """Refuse unsupported arguments of transformers' `apply_chat_template`.

    Raises:
        ParameterError: `tools` or `documents` is given.
    """
    if "tools" in fields:
        raise ParameterError(f"tools: {NO_TOOLS}: leave it out")
    if "documents" in fields:
        raise ParameterError("documents: minillm does not pass them to chat templates: put their text into a message")


def read_messages(messages: Any, names: frozenset[str]) -> list[dict[str, Any]]:
    """Check a conversation and copy it into plain types, which have no methods that a template could misuse.

    As in transformers, a key with the value None counts as absent.

    Args:
        messages: the conversation, `Messages`
        names: keys and texts that the template's source spells out. Beside role and content, a message may have only
            keys among them: another could have no effect

    Raises:
        PromptError: it is not a list of messages, is empty, or a message does not have the form above.
    """
    if isinstance(messages, str):
        raise PromptError(f"messages should be a list of {FORM}, found text: use `generate` to continue plain text")
    if isinstance(messages, Mapping):
        raise PromptError(f"messages should be a list of {FORM}, found a single message: put it into a list")
    if not isinstance(messages, Iterable) or getattr(messages, "ndim", 1) == 0:  # a 0-d array
        raise PromptError(f"messages should be a list of {FORM}, found {type(messages).__name__}")
    chat = [_read_message(f"messages[{i}]", message, names) for i, message in enumerate(messages)]
    if not chat:
        raise PromptError("messages is empty: expected at least one message")
    return chat


def plain(value: Any) -> Any:
    """A deep copy in the types of JSON.

    Raises:
        TypeError: a value has no JSON type.
        ValueError: it contains itself, or is nested too deeply.
    """
    try:
        return json.loads(json.dumps(value))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _read_message(where: str, message: Any, names: frozenset[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f"{where} should be {FORM}, found {type(message).__name__}")
    given = {key: value for key, value in message.items() if value is not None}
    _check_role(where, given)
    if "content" not in given:
        raise PromptError(f'{where} has no content: give its text, which may be ""')
    _check_content(where, given["content"], names)
    for key in given.keys() - {"role", "content"}:
        alike = _REASONING if key in _REASONING else (key,)
        if not names.intersection(alike):
            raise PromptError(
                f"{where}: {shown(key)} has no effect, since the chat template does not use it: leave it out"
            )
    reasoning = next((given[key] for key in _REASONING if key in given), None)
    if reasoning is not None:
        given = {"thinking": reasoning} | given | {"reasoning_content": reasoning}
    try:
        copy: dict[str, Any] = plain(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"{where} should hold only JSON values: {error!s:.100}") from None
    return copy


def _check_role(where: str, message: Message) -> None:
    if "role" not in message:
        raise PromptError(f'{where} has no role: expected "user", "assistant" or, with most templates, "system"')
    role = message["role"]
    if not isinstance(role, str):
        raise PromptError(f"{where}: role should be text, found {shown(role)}")
    if role in _TOOL_ROLES:
        raise PromptError(f"{where}: {NO_TOOLS}, which the role {role!r} belongs to: leave the message out")
    for key in sorted(_TOOL_KEYS & message.keys()):
        raise PromptError(f"{where}: {NO_TOOLS}, which the key {key!r} belongs to: leave it out")


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
