"""Messages as clients send them, in the form that the model's template reads.

Clients send back what other servers have answered, and mark what these cache: `reasoning_details`, `annotations`,
`provider_specific_fields`, `cache_control`, `index` of a call. What the template does not read is left out here, as the
servers of this API do it; in Python the same key is refused (`chat.template.unread_keys` says which these are).
"""

import json
import logging
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from ..errors import PromptError, listed, printable, shown
from ..text.chat import ChatTemplate
from ..text.chat.template import OWN_VARIABLES, unread_keys

logger = logging.getLogger("minillm.server")

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages; a template may have more"""

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part of a content -> the key of its text"""
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
"""Types of parts with thoughts, which templates read from a key of the message, if at all"""
TEMPLATE_VARIABLES = ("reasoning_effort", "verbosity", "enable_thinking")
"""Fields of a request that are variables of templates; without effect where the model's does not use them"""


def conversation(messages: list[Any], template: ChatTemplate) -> list[Any]:
    """Messages of OpenAI's form in the form that a template reads. What is malformed stays, to be refused by it.

    The role "developer" becomes "system" if the template knows no developer, and text parts become one text, with line
    breaks between them, if it reads no parts. The result of a call gets the name of its function, which some templates
    need, from the call of the same id.

    Raises:
        PromptError: a role that neither OpenAI's API nor the template has: many templates would write any.
        CheckpointError: the template is broken.
    """
    names = template.names
    functions: dict[str, str] = {}
    chat = []
    for i, message in enumerate(messages):
        read = _read_message(message, names)
        if isinstance(read, dict):
            role = read.get("role")
            if isinstance(role, str) and role not in ROLES and role not in names:
                raise PromptError(f"messages[{i}].role: expected {listed(ROLES)}, found {shown(role)}")
            functions |= _called(read)
            call = read.get("tool_call_id")
            if role == "tool" and isinstance(call, str) and call in functions:
                read = {"name": functions[call]} | read
        chat.append(read)
    return chat


def joined_instructions(chat: list[Any]) -> list[Any]:
    """A conversation for a template that takes instructions only as its first message, and turns only in turns.

    Coding agents write several messages of the system, also between turns (Claude Code), and of the user. The first
    ones of the system become one; later ones the user's; and the user's that follow each other become one. A message
    with more than a role and a text stays as it is, and so does what is wrong with it.
    """
    joined: list[Any] = []
    for message in chat:
        if not isinstance(message, dict) or "role" not in message:
            return chat
        last = joined[-1] if joined else {"role": None}
        if message["role"] == "system" and last["role"] not in (None, "system"):
            message = message | {"role": "user"}
        plain = all(each.keys() == {"role", "content"} and isinstance(each["content"], str) for each in (last, message))
        if plain and message["role"] == last["role"] in ("system", "user"):
            joined[-1] = last | {"content": f"{last['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def template_variables(request: Any, template: ChatTemplate) -> dict[str, Any]:
    """The variables of a template that a request sets, as far as the template uses them.

    Raises:
        CheckpointError: the template is broken.
    """
    fields = {name: getattr(request, name, None) for name in TEMPLATE_VARIABLES}
    if fields["reasoning_effort"] == "none" and fields["enable_thinking"] is None:
        fields["enable_thinking"] = False
    given = {name: value for name, value in fields.items() if value is not None}
    given |= request.chat_template_kwargs or {}
    refused = OWN_VARIABLES | {"documents"}  # with its reason, when the template is rendered
    return {name: value for name, value in given.items() if name in template.variables | refused}


def _read_message(message: Any, names: frozenset[str]) -> Any:
    if not isinstance(message, dict):
        return message
    read = {key: value for key, value in message.items() if value is not None}
    if read.get("role") == "developer" and "developer" not in names:
        read["role"] = "system"
    if read.get("role") in ("assistant", "tool") and "content" not in read:
        read["content"] = read.get("refusal", "")  # calls or thoughts alone; a tool that returns nothing
    if isinstance(read.get("content"), list):
        parts = read_parts(read["content"])
        joined = "text" not in names and all(map(is_text, parts))
        read["content"] = "\n".join(part["text"] for part in parts) if joined or not parts else parts
    if isinstance(read.get("tool_calls"), list):
        read["tool_calls"] = [_read_call(call) for call in read["tool_calls"]]
    for key in unread_keys(read, names | {"tool_calls"}):
        if key != "function_call" or not read[key]:  # a call of the old form is refused
            del read[key]
    return read


def read_parts(parts: list[Any]) -> list[Any]:
    """Parts of a content: text without marks beside it, no thoughts; what is no text as it is."""
    return [_read_part(part) for part in parts if not (isinstance(part, dict) and part.get("type") in THOUGHTS)]


def _read_part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, dict) else None
    text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    return {"type": "text", "text": text} if isinstance(text, str) else part


def is_text(part: Any) -> bool:
    """True for a part that `read_parts` has read as text."""
    return isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str)


def _read_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    read = {key: value for key, value in call.items() if value is not None}
    if isinstance(read.get("function"), dict):
        read["function"] = {key: value for key, value in read["function"].items() if value is not None}
    if read.get("type") == "custom" and isinstance(read.get("custom"), dict):
        custom = read.pop("custom")
        read |= {"type": "function", "function": custom_call(custom.get("name"), custom.get("input"))}
    return read


@cache
def log_joined() -> None:
    """Say once that a conversation is not rendered as it was sent."""
    logger.warning("messages of the system and the user are joined: the chat template takes no more than one in turn")


@lru_cache(64)
def log_skipped(path: str, what: str, kind: str) -> None:
    """Say once that something in requests to an endpoint has no effect."""
    logger.warning("%s: %s of the type %s are skipped: minillm has no such tools", path, what, printable(kind))


def custom_call(name: Any, text: Any) -> dict[str, Any]:
    """The function of a call whose argument is free text."""
    return {"name": name, "arguments": json.dumps({"input": text})}


def _called(message: Mapping[str, Any]) -> dict[str, str]:
    """The names of functions in a message's calls, by the calls' ids."""
    calls = message.get("tool_calls")
    pairs = [
        (call.get("id"), call["function"].get("name"))
        for call in (calls if isinstance(calls, list) else ())
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]
    return {key: name for key, name in pairs if isinstance(key, str) and isinstance(name, str)}
