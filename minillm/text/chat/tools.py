"""Tools of a conversation: their definitions, checked, and their messages, for templates that write them or do not.

Definitions and messages have the form of OpenAI's API (platform.openai.com/docs/guides/function-calling), which is also
that of transformers' `apply_chat_template(tools=...)`:

    {"type": "function", "function": {"name": ..., "description": ..., "parameters": <JSON schema of an object>}}
    {"role": "assistant", "content": "", "tool_calls": [{"id": ..., "type": "function",
                                                         "function": {"name": ..., "arguments": {...}}}]}
    {"role": "tool", "tool_call_id": ..., "content": ...}

A template that knows no tools can still be used: `described` turns definitions, calls and results into text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ParameterError, PromptError, shown

MOST_TOOLS = 128
"""As in OpenAI's API"""
LONGEST = 2**18
"""Most characters of all definitions, as JSON"""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's rule

_EXPLANATION = """\
You can call functions. To call one, answer with a JSON object {"name": <function name>, "arguments": {<its arguments>}}
and nothing else; to call several, with one such object in each line. Otherwise answer in plain text.
Available functions:
"""


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


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Check the definitions of tools and copy them into plain types.

    Keys beside those above ("strict", "return") are passed on to the template, as transformers does.

    Raises:
        ParameterError: it is not a list of definitions, one is malformed, a name is there twice, or they are too long.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise ParameterError(f"tools should be a list of function definitions, found {shown(tools)}")
    if len(tools) > MOST_TOOLS:
        raise ParameterError(f"tools holds {len(tools)} definitions, expected at most {MOST_TOOLS}")
    try:
        copies = plain(list(tools))
        length = len(json.dumps(copies))
    except (TypeError, ValueError) as error:
        raise ParameterError(f"tools should hold only JSON values: {error!s:.100}") from None
    if length > LONGEST:
        raise ParameterError(f"tools has {length} characters as JSON, expected at most {LONGEST}")
    for i, tool in enumerate(copies):
        _check_tool(f"tools[{i}]", tool)
    names = [tool["function"]["name"] for tool in copies]
    for name in names:
        if names.count(name) > 1:
            raise ParameterError(f"tools defines {name!r} twice: give each function a name of its own")
    return copies  # type: ignore[no-any-return]


def _check_tool(where: str, tool: Any) -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise ParameterError(f'{where} should be {{"type": "function", "function": {{...}}}}, found {shown(tool)}')
    function = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ParameterError(f"{where}: name should be 1 to 64 letters, digits, _ or -, found {shown(name)}")
    for key, kind, expected in (
        ("description", str, "text"),
        ("parameters", dict, "a JSON schema of an object"),
        ("strict", bool, "true or false"),
    ):
        if function.get(key) is None:
            function.pop(key, None)
        elif not isinstance(function[key], kind):
            raise ParameterError(f"{where}: {key} should be {expected}, found {shown(function[key])}")
    declared = function.get("parameters", {}).get("type") or "object"
    if declared != "object" and not (isinstance(declared, list) and "object" in declared):
        raise ParameterError(f'{where}: the type of parameters should be "object", found {shown(declared)}')


# --- messages ---------------------------------------------------------------------------------------------------------


def read_tool_calls(where: str, calls: Any) -> list[Any]:
    """Check a message's tool calls. Arguments given as JSON text, as OpenAI's clients do, become an object.

    Text that is not JSON stays text: a model may have written it.

    Raises:
        PromptError: a call is malformed.
    """
    if not isinstance(calls, list):
        raise PromptError(f"{where}: tool_calls should be a list of calls, found {shown(calls)}")
    return [_read_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]


def _read_call(where: str, call: Any) -> dict[str, Any]:
    form = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise PromptError(f"{where} should be {form}, found {shown(call)}")
    if call.get("type", "function") != "function" or not isinstance(call.get("id", ""), str):
        raise PromptError(f"{where} should be {form}, found {shown(call)}")
    function = dict(call["function"])
    if not isinstance(function.get("name"), str):
        raise PromptError(f"{where}: name should be text, found {shown(function.get('name'))}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif not isinstance(arguments, Mapping):
        raise PromptError(f"{where}: arguments should be JSON text or an object, found {shown(arguments)}")
    return dict(call) | {"function": function | {"arguments": arguments}}


def described(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without tools, for a template that knows none: definitions, calls and results become text.

    The definitions stand in the system message, calls in the assistant's content, in the format "json"; a result is a
    user's message.

    Args:
        messages: checked messages, as `template.read_messages` returns them
        tools: checked definitions
    """
    names: dict[str, str] = {}
    chat = [_described(message, names) for message in messages]
    if tools:
        definitions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        text = _EXPLANATION + definitions
        if chat[0]["role"] == "system":
            content = chat[0]["content"]
            more = f"\n\n{text}"
            chat[0]["content"] = content + (more if isinstance(content, str) else [{"type": "text", "text": more}])
        else:
            chat.insert(0, {"role": "system", "content": text})
    return chat


def _described(message: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """One message as text; `names` collects the names of calls by id, for their results."""
    calls = message.get("tool_calls", [])
    names.update({call["id"]: call["function"]["name"] for call in calls if "id" in call})
    if calls:
        written = [{key: call["function"][key] for key in ("name", "arguments")} for call in calls]
        lines = [json.dumps(call, ensure_ascii=False) for call in written]
        text = "\n".join([*filter(None, [_text(message)]), *lines])
        return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}
    if message["role"] == "tool":
        name = message.get("name", names.get(message.get("tool_call_id", ""), ""))
        return {"role": "user", "content": f"Result of {name or 'the call'}:\n{_text(message)}"}
    return dict(message)


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
