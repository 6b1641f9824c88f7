"""Tools, conversations in which they are called, and the templates in tests/data/tool_templates."""

from pathlib import Path
from typing import Any

from minillm.text.chat import ChatTemplate

from ...conversations import assistant, system, user

TOOL_TEMPLATES = Path(__file__).parents[2] / "data" / "tool_templates"
NAMES = sorted(path.stem for path in TOOL_TEMPLATES.glob("*.jinja"))

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather in a "city".',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get-time", "description": "Now"}}
TOOLS = [WEATHER, TIME]


def call(name: str, arguments: Any, call_id: str = "abcdefgh1") -> dict[str, Any]:
    """A call in a message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str, call_id: str = "abcdefgh1", **more: Any) -> dict[str, Any]:
    """A result of a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": content, **more}


ASKED = [system("Be brief."), user("Weather in Paris?")]
CALLED = [*ASKED, assistant("", tool_calls=[call("get_weather", {"city": "Paris", "days": 2})])]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "asked": ASKED,
    "asked without a system message": ASKED[1:],
    "called": [*CALLED, result('{"sky": "clear"}')],
    "named": [*CALLED, result("clear", name="get_weather")],
    "answered": [*CALLED, result("clear", name="get_weather"), assistant("Clear."), user("And now?")],
    "with words": [
        *ASKED,
        assistant("Let me see.", tool_calls=[call("get-time", {})]),
        result("9:15", name="get-time"),
    ],
    "two at once": [
        *ASKED,
        assistant("", tool_calls=[call("get_weather", {"city": "Rome"}), call("get-time", {}, "abcdefgh2")]),
        result("rain", name="get_weather"),
        result("9:15", "abcdefgh2", name="get-time"),
    ],
    "characters": [user("é"), assistant("", tool_calls=[call("get_weather", {"city": '日本 "x"\n</tool_call>'})])],
}


def template(name: str) -> ChatTemplate:
    """One of tests/data/tool_templates."""
    source = (TOOL_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
