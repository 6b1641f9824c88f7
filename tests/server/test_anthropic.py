"""Anthropic's Messages API: messages of every kind as the chat that they stand for, answers, streams and errors."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.server import make_app
from minillm.text.chat import ChatTemplate

from ..text.chat.conversations import TOOLS
from ..tiny import write_checkpoint
from .client import post

PATH, CHAT = "/v1/messages", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"model": "minillm", "messages": HI, "max_tokens": 300, "temperature": 0}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>{% endif %}{% endif %}{# </think> #}"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
FUNCTIONS = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"].get("parameters", {"type": "object"}),
    }
    for tool in TOOLS
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_checkpoint(tmp_path_factory.mktemp("anthropic"), max_position_embeddings=2048)
    with Engine(folder, max_batch_size=4, prefix_cache=True) as engine:
        engine.chat_template = ChatTemplate(TEMPLATE)
        yield engine


@pytest.fixture(scope="module")
def app(engine: Engine) -> Starlette:
    """A server of it."""
    return make_app(engine)


def message_of(app: Starlette, body: dict[str, Any]) -> dict[str, Any]:
    response = post(app, PATH, body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def streamed(app: Starlette, body: dict[str, Any]) -> dict[str, Any]:
    """The message of a stream, put together as the reference says."""
    text = post(app, PATH, body | {"stream": True}).text
    message: dict[str, Any] = {}
    open_block = None
    for part in text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
                assert message["content"] == []
            case "content_block_start":
                assert open_block is None and event["index"] == len(message["content"])
                open_block = event["index"]
                message["content"].append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                assert event["index"] == open_block
                kind = event["delta"].pop("type").removesuffix("_delta")
                [(key, piece)] = event["delta"].items()
                block = message["content"][-1]
                block["json" if kind == "input_json" else key] += piece
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    for block in message["content"]:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return message


def alike(message: dict[str, Any]) -> dict[str, Any]:
    """A message without its ids and what the prefix cache had."""
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return message | {"id": "", "content": content, "usage": (prompt, usage["output_tokens"])}


def test_a_message_is_the_chat_s_and_its_stream_puts_it_together(app: Starlette) -> None:
    body = ASKED | {"max_tokens": 12}
    message = message_of(app, body)
    chat = post(app, CHAT, {"messages": HI, "max_tokens": 12, "temperature": 0}).json()
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert sum(message["usage"].values()) == chat["usage"]["total_tokens"]
    assert alike(streamed(app, body)) == alike(message)


@pytest.mark.longer
def test_thoughts_text_and_calls_are_blocks(app: Starlette) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    said = f"<think>Hm.</think>I look.\n{CALL}"
    body = ASKED | {"tools": FUNCTIONS, "guided_regex": re.escape(said)}
    message = message_of(app, body)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][0]["thinking"] == "Hm." and message["content"][1]["text"] == "I look."
    assert message["content"][2]["input"] == {"city": "Rome", "days": 2} and message["stop_reason"] == "tool_use"
    assert alike(streamed(app, body)) == alike(message)
    calls = [TOOLS[0]["function"]["name"]]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": calls[0]}):
        message = message_of(app, ASKED | {"tools": FUNCTIONS[:1], "tool_choice": choice})
        assert [block.get("name") for block in message["content"]] == calls and message["stop_reason"] == "tool_use"


def test_the_end_has_its_reason(app: Starlette) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    body = ASKED | {"guided_regex": "one two three"}
    assert message_of(app, body)["stop_reason"] == "end_turn"
    stopped = message_of(app, body | {"stop_sequences": [" two"]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " two")
    assert stopped["content"] == [{"type": "text", "text": "one"}]
    schema = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": False}
    formed = message_of(app, ASKED | {"output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert json.loads(formed["content"][0]["text"]) == {"n": 1}


def tokens_of(app: Starlette, body: dict[str, Any]) -> int:
    response = post(app, f"{PATH}/count_tokens", body)
    assert response.status_code == 200, response.text
    assert response.json().keys() == {"input_tokens"}
    return int(response.json()["input_tokens"])


def test_a_conversation_of_blocks_is_the_chat_that_it_stands_for(app: Starlette, engine: Engine) -> None:
    blocks: dict[str, Any] = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "text", "text": "In Rome."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Rome"}},
                    {"type": "server_tool_use", "id": "b", "name": "web_search", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "rain"}]},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
    }
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?\nIn Rome."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "name": "get_weather", "content": "rain"},
        {"role": "user", "content": "And now?"},
    ]
    expected = engine.tokenizer.encode(engine.render_chat(chat), add_special_tokens=False)  # type: ignore[union-attr]
    assert tokens_of(app, {"model": "minillm", **blocks}) == len(expected)
    usage = message_of(app, ASKED | blocks | {"max_tokens": 1})["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(expected)


def test_a_last_message_of_the_assistant_is_continued_and_thinking_is_the_template_s(app: Starlette) -> None:
    begun = [*HI, {"role": "assistant", "content": "I say"}]
    body = {"messages": begun, "max_tokens": 6, "temperature": 0, "continue_final_message": True}
    expected = post(app, CHAT, body).json()["choices"][0]["message"]["content"]
    assert message_of(app, ASKED | {"messages": begun, "max_tokens": 6})["content"][0]["text"] == expected
    plain = tokens_of(app, {"messages": HI})
    enabled = tokens_of(app, {"messages": HI, "thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert enabled > plain == tokens_of(app, {"messages": HI, "thinking": {"type": "disabled"}})


def test_what_is_not_done_is_one_line_in_anthropic_s_form(app: Starlette) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    for change, word in (
        ({"messages": [{"role": "user", "content": [image]}]}, "image"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "robot"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tools": [5]}, "tools[0]"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"stop_sequences": 5}, "stop_sequences"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"no_such_field": 1}, "no_such_field"),
    ):
        response = post(app, PATH, ASKED | change)
        error = response.json()
        assert response.status_code == 400 and error["type"] == "error", change
        assert error["error"]["type"] == "invalid_request_error" and word in error["error"]["message"]
        assert "\n" not in error["error"]["message"]
    missing = post(app, PATH, ASKED | {"model": "claude"})
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    ignored = {"metadata": {"user_id": "x"}, "service_tier": "auto", "container": None, "betas": ["x"], "speed": "fast"}
    ignored |= {"context_management": {"edits": []}, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    body = ASKED | {"max_tokens": 4}
    assert message_of(app, body | ignored)["content"] == message_of(app, body)["content"]


def test_a_key_may_come_as_anthropic_s_clients_send_it(engine: Engine) -> None:
    app = make_app(engine, keys=["a key"])
    body = ASKED | {"max_tokens": 1}
    assert post(app, PATH, body, headers={"x-api-key": "a key"}).status_code == 200
    for headers in ({"x-api-key": "another"}, {}):
        response = post(app, PATH, body, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
