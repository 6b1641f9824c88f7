"""Anthropic's own client against a real server: messages, streams, tools, counts and errors."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server needs the extra serve")
pytest.importorskip("anthropic", reason="the client is in the extra clients")

import anthropic

from minillm import Engine
from minillm.server import make_app

from ..text.chat.conversations import TOOLS
from .client import LEFT_OPEN, TEMPLATE, calling_engine, listening

pytestmark = [pytest.mark.slow, LEFT_OPEN]

TALK: list[Any] = [{"role": "user", "content": "A list of colors: red,"}]
KEY = "a key"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    engine = Engine(max_batch_size=8, prefix_cache=True)
    engine.chat_template = TEMPLATE
    with calling_engine(tmp_path_factory.mktemp("calling"), 2048) as calling:
        app = make_app({"demo": engine, "calling": calling}, keys=[KEY])
        with listening(app) as url, anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
            yield client


def test_a_message_and_its_stream(client: Any) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": TALK, "max_tokens": 8}
    greedy = {"extra_body": {"temperature": 0}}
    message = client.messages.create(**asked, **greedy)
    assert message.content[0].type == "text" and message.stop_reason == "max_tokens" and message.content[0].text
    with client.messages.stream(**asked, **greedy) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == message.content[0].text
    assert final.usage.output_tokens == message.usage.output_tokens == 8


def test_tools_are_called_and_answered(client: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    function = TOOLS[0]["function"]
    tools = [{"name": function["name"], "description": "?", "input_schema": function["parameters"]}]
    asked: dict[str, Any] = {"model": "calling", "tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 400}
    asked["extra_body"] = {"seed": 3}  # numbers that a random model draws do not always end within 400 tokens
    with client.messages.stream(messages=TALK, **asked) as stream:
        message = stream.get_final_message()
    call = message.content[-1]
    assert call.type == "tool_use" and call.name == function["name"] and call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [*TALK, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=turns, **asked).stop_reason == "tool_use"
    assert client.messages.count_tokens(model="calling", messages=turns).input_tokens > 0


def test_errors_are_the_client_s_own(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="demo"):
        client.messages.create(model="claude", messages=TALK, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="nonsense"):
        client.messages.create(model="demo", messages=TALK, max_tokens=1, extra_body={"nonsense": 1})
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="another").messages.create(model="demo", messages=TALK, max_tokens=1)
