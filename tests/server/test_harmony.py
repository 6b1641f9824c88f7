"""gpt-oss's harmony over HTTP: thoughts, content and calls in each API, whole and streamed; what no grammar holds."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.server import make_app
from minillm.server.ollama import _Reading
from minillm.text.chat import FORMATS, REASONING_FORMATS, AnswerParser, parser_of

from ..text.chat.conversations import TOOLS, template
from ..tiny import write_checkpoint
from .client import chunks_of, error_of, post

pytest.importorskip("llguidance", reason="needs the extra `guided`")

CHAT = "/v1/chat/completions"
START, ARGUMENTS = "<|start|>assistant", '{"city": "Rome", "days": 2}'
SAID = (
    f"<|channel|>analysis<|message|>Which?<|end|>{START}<|channel|>commentary<|message|>I look.<|end|>"
    f"{START}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": TOOLS,
    "guided_regex": re.escape(SAID),
    "max_tokens": 400,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starlette]:
    """A server of a model whose markers are plain text, so that a guide says all of its answer."""
    folder = write_checkpoint(tmp_path_factory.mktemp("harmony"), max_position_embeddings=1500)
    with Engine(folder, max_batch_size=4) as engine:
        engine.chat_template = template("harmony")
        yield make_app(engine)


@pytest.mark.longer
def test_chat_completions_tell_them_apart_whole_and_streamed(app: Starlette) -> None:
    [choice] = post(app, CHAT, ASKED).json()["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == (
        "Which?",
        "I look.",
        "tool_calls",
    )
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    streamed = {"reasoning_content": "", "content": "", "arguments": "", "name": ""}
    for chunk in chunks_of(post(app, CHAT, ASKED | {"stream": True}).text):
        [choice] = chunk["choices"]
        for name in ("reasoning_content", "content"):
            streamed[name] += choice["delta"].get(name) or ""
        for part in choice["delta"].get("tool_calls", ()):
            for name in ("name", "arguments"):
                streamed[name] += part["function"].get(name, "")
    assert streamed == {
        "reasoning_content": "Which?",
        "content": "I look.",
        "arguments": ARGUMENTS,
        "name": "get_weather",
    }
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.longer
def test_one_call_alone_ends_the_answer(app: Starlette) -> None:
    twice = ASKED | {"guided_regex": re.escape(SAID + SAID), "parallel_tool_calls": False}
    message = post(app, CHAT, twice).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1 and message["content"] == "I look."


@pytest.mark.slow
def test_responses_and_messages_have_items_of_each_kind(app: Starlette) -> None:
    said = {name: ASKED[name] for name in ("guided_regex", "temperature")}
    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = said | {"input": "Weather?", "tools": functions, "max_output_tokens": 400}
    output = post(app, "/v1/responses", body).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert (output[2]["name"], output[2]["arguments"]) == ("get_weather", ARGUMENTS)
    offered = [
        {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", {"type": "object"})}
        for tool in TOOLS
    ]
    body = said | {"messages": ASKED["messages"], "tools": offered, "max_tokens": 400}
    message = post(app, "/v1/messages", body).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][2]["input"] == json.loads(ARGUMENTS) and message["stop_reason"] == "tool_use"


def test_ollama_reports_a_call_when_it_is_complete() -> None:
    reader = _Reading(AnswerParser(REASONING_FORMATS["harmony"].parser(), parser_of(FORMATS["harmony"], {"f"})))
    pieces = [reader.add(SAID[at : at + 5], last=at + 5 >= len(SAID)) for at in range(0, len(SAID), 5)]
    assert "".join(content for content, _, _ in pieces) == "I look."
    assert "".join(thoughts for _, _, thoughts in pieces) == "Which?"
    assert [call.arguments for _, calls, _ in pieces for call in calls] == [ARGUMENTS]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"tool_choice": "required"}, "a call required"),
        ({"tools": [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}]}, "a strict function"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS[:1]}}},
            "some of the functions alone",
        ),
    ],
    ids=["required", "strict", "allowed"],
)
def test_what_only_a_grammar_can_grant_is_refused_in_a_line(app: Starlette, more: dict[str, Any], what: str) -> None:
    body = {name: value for name, value in ASKED.items() if name != "guided_regex"} | more
    message = error_of(post(app, CHAT, body))["message"]
    assert message == f"tools: this model's calls are held by no grammar, so {what} cannot be granted: leave that out"
