"""Chat messages: checked and copied into plain types before a template sees them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ParameterError, PromptError, shown

Message = Mapping[str, Any]
Messages = Iterable[Message]
"""`{"role": ..., "content": ...}` each, oldest first."""

FORM = '{"role": ..., "content": ...}'
NO_TOOLS = "minillm runs no tools"

_TOOL_ROLES = {"tool", "function", "ipython"}
_TOOL_KEYS = {"tool_calls", "tool_call_id", "function_call"}
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning text. transformers passes it to the template under the first two names."""


def refuse_tools(fields: Mapping[str, Any]) -> None:
    """Refuse unsupported arguments of transformers' `apply_chat_template`.

    Raises:
        ParameterError: `tools` or `documents` is given.
    """
    if "tools" in fields:
        raise ParameterError(f"tools: {NO_TOOLS}; leave it out")
    if "documents" in fields:
        raise ParameterError("documents: minillm gives none to a chat template; put their text into a message")


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
        raise PromptError(f"messages should be a list of {FORM}, found text: `generate` continues plain text")
    if isinstance(messages, Mapping):
        raise PromptError(f"messages should be a list of {FORM}, found one alone: put it into a list")
    if not isinstance(messages, Iterable) or getattr(messages, "ndim", 1) == 0:  # a 0-d array
        raise PromptError(f"messages should be a list of {FORM}, found {type(messages).__name__}")
    chat = [_read_message(f"messages[{i}]", message, names) for i, message in enumerate(messages)]
    if not chat:
        raise PromptError("messages is empty: a conversation has at least one message")
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
                f"{where}: {shown(key)} would have no effect, the chat template does not name it; leave it out"
            )
    reasoning = next((given[key] for key in _REASONING if key in given), None)
    if reasoning is not None:
        given = {"thinking": reasoning} | given | {"reasoning_content": reasoning}
    try:
        copy: dict[str, Any] = plain(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"{where} should hold text, found what JSON cannot say: {error!s:.100}") from None
    return copy


def _check_role(where: str, message: Message) -> None:
    if "role" not in message:
        raise PromptError(f'{where} has no role: "user", "assistant", or mostly "system"')
    role = message["role"]
    if not isinstance(role, str):
        raise PromptError(f"{where}: role should be text, found {shown(role)}")
    if role in _TOOL_ROLES:
        raise PromptError(f"{where}: {NO_TOOLS}, and {role!r} is the role of one; leave it out")
    for key in sorted(_TOOL_KEYS & message.keys()):
        raise PromptError(f"{where}: {NO_TOOLS}, and {key!r} belongs to them; leave it out")


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
            raise PromptError(f"{where}: content has a part of type {shown(part['type'])}: minillm takes text alone")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise PromptError(
                f'{where}: a part of content should be {{"type": "text", "text": ...}}, found {shown(part)}'
            )
    if "text" not in names:
        raise PromptError(f"{where}: the chat template takes content as one text, not in parts: join them")
