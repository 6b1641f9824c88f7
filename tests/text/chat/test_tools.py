"""Definitions of tools and messages with calls: what is refused, and what templates without tools make of them."""

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine
from minillm.errors import MinillmError, ParameterError
from minillm.formats import open_model
from minillm.formats.folder import TOOL_USE
from minillm.formats.write_checkpoint import write_checkpoint as quantise
from minillm.text.chat import ChatTemplate, read_calls, read_tools

from ...conversations import TEMPLATES, assistant, system, user
from ...tiny import write_checkpoint
from .conversations import ASKED, CALLED, CONVERSATIONS, NAMES, TOOL_TEMPLATES, TOOLS, WEATHER, call, result, template


def tool(**function: Any) -> dict[str, Any]:
    """A definition."""
    return {"type": "function", "function": {"name": "f"} | function}


BAD_TOOLS: dict[str, tuple[Any, str]] = {
    "text": ("f", "tools should be a list of function definitions, found 'f'"),
    "one alone": (WEATHER, "tools should be a list of function definitions"),
    "a function": ([len], "tools should hold only JSON values"),
    "no type": ([{"function": {"name": "f"}}], r'tools\[0\] should be \{"type": "function"'),
    "another type": ([WEATHER, {"type": "web_search"}], r"tools\[1\] should be"),
    "no function": ([{"type": "function", "name": "f"}], r"tools\[0\] should be"),
    "no name": ([tool(name=None)], r"tools\[0\]: name should be 1 to 64 letters, digits, _ or -, found None"),
    "a name with quotes": ([tool(name='f"')], "name should be"),
    "a long name": ([tool(name="f" * 65)], "name should be"),
    "a name twice": ([tool(), WEATHER, tool()], "tools defines 'f' twice"),
    "description": ([tool(description=3)], "description should be text, found 3"),
    "parameters": ([tool(parameters=[])], r"parameters should be a JSON schema of an object, found \[\]"),
    "parameters of a list": ([tool(parameters={"type": "array"})], 'type of parameters should be "object"'),
    "strict": ([tool(strict="yes")], "strict should be true or false, found 'yes'"),
    "too many": ([tool(name=f"f{i}") for i in range(129)], "holds 129 definitions, expected at most 128"),
    "too long": ([tool(description="x" * 2**18)], "characters as JSON, expected at most 262144"),
}


@pytest.mark.parametrize("name", BAD_TOOLS)
def test_a_definition_that_cannot_be_meant_is_named(name: str) -> None:
    tools, words = BAD_TOOLS[name]
    with pytest.raises(ParameterError, match=words) as error:
        template("hermes").render(ASKED, tools=tools)
    assert "\n" not in str(error.value)


def test_definitions_are_copied_and_what_is_null_is_absent() -> None:
    given = [tool(parameters={"type": "object", "properties": {}}, description=None, strict=None)]
    before = json.dumps(given)
    [read] = read_tools(given)
    assert read["function"] == {"name": "f", "parameters": {"type": "object", "properties": {}}}
    read["function"]["parameters"]["properties"]["x"] = 1
    assert json.dumps(given) == before


def test_a_template_without_tools_gets_them_as_text() -> None:
    chatml = ChatTemplate((TEMPLATES / "chatml.jinja").read_text(encoding="utf-8"))
    assert chatml.call_format is not None
    assert chatml.call_format.name == "json"
    text = chatml.render([*CALLED, result("clear")], tools=TOOLS)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    for one in TOOLS:
        assert json.dumps(one["function"]) in text
    spoken = text[text.index("<|im_start|>assistant\n") + len("<|im_start|>assistant\n") :].split("<|im_end|>")[0]
    answer = read_calls(spoken, chatml.call_format, {"get_weather"})
    assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == [
        ("get_weather", {"city": "Paris", "days": 2})
    ]
    assert text.endswith("<|im_start|>user\nResult of get_weather:\nclear<|im_end|>\n<|im_start|>assistant\n")
    assert chatml.render(ASKED[1:], tools=TOOLS).startswith("<|im_start|>system\nYou can call")
    for messages in CONVERSATIONS.values():
        chatml.render(messages)  # a conversation may go on without the definitions
    parts = ChatTemplate((TEMPLATES / "macros.jinja").read_text(encoding="utf-8"))
    assert "You can call" in parts.render([system([{"type": "text", "text": "a"}]), *ASKED[1:]], tools=TOOLS)


def test_arguments_that_are_no_json_are_written_as_the_model_wrote_them() -> None:
    broken = [*ASKED, assistant("", tool_calls=[call("get_weather", '{"city": ')])]
    assert '"arguments": {"city": }' in template("hermes").render(broken, tools=TOOLS)


def test_an_engine_answers_with_tools(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, max_position_embeddings=1024)
    (folder / "chat_template.jinja").write_text((TOOL_TEMPLATES / "hermes.jinja").read_text(encoding="utf-8"))
    with Engine(folder) as engine:
        assert engine.tokenizer is not None
        plain, offered = (engine.render_chat([user("Hi")], tools=tools) for tools in (None, TOOLS))
        assert "get_weather" in offered
        assert "get_weather" not in plain
        answer = engine.chat([user("Hi")], tools=TOOLS, max_new_tokens=2)
        assert answer.prompt_token_ids == engine.tokenizer.encode(offered, add_special_tokens=False)


def test_the_template_for_tools_goes_with_the_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("plain")
    (folder / TOOL_USE).parent.mkdir()
    (folder / TOOL_USE).write_text("{{ tools | length }} tools")
    quantise(folder, tmp_path / "quantized", "int8")
    for path in (folder, tmp_path / "quantized"):
        found = open_model(path).chat_template
        assert found is not None
        assert (found.render(ASKED), found.render(ASKED, tools=TOOLS)) == ("plain", "2 tools")


def test_hostile_definitions_and_messages_end_in_one_line() -> None:
    draw = random.Random(8)
    odd: list[Any] = [None, 0, -1.5, True, "", "f", "x" * 70, [], {}, [[]], {"a": 1}, "{}", "{", "\ud800", float("nan")]
    odd += [{"type": "object"}, {"name": "f", "arguments": "[]"}, [call("f", 1)], [{"function": {"name": "f"}}]]

    def spoilt(value: Any) -> Any:
        if draw.random() < 0.12:
            return draw.choice(odd)
        if isinstance(value, dict):
            copy = {key: spoilt(part) for key, part in value.items() if draw.random() > 0.03}
            return copy | (
                {draw.choice(["x", "name", "type", "strict"]): draw.choice(odd)} if draw.random() < 0.05 else {}
            )
        return [spoilt(part) for part in value] if isinstance(value, list) else value

    templates = [*map(template, NAMES), ChatTemplate((TEMPLATES / "chatml.jinja").read_text(encoding="utf-8"))]
    for _ in range(500):
        messages, tools = spoilt(draw.choice([*CONVERSATIONS.values()])), spoilt(TOOLS)
        with suppress(MinillmError):
            draw.choice(templates).render(messages, tools=tools)
