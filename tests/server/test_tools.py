"""Tools over HTTP: calls that are read, required, streamed; and whatever a client may send instead."""

import asyncio
import copy
import json
import random
import re
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.server import make_app
from minillm.text.chat import FORMATS, ChatTemplate

from ..text.chat.conversations import CONVERSATIONS, TOOLS, WEATHER
from .client import calling_engine, chunks_of, error_of, post, talk

pytest.importorskip("llguidance", reason="needs the extra `guided`")

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS, "seed": 1}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SAID = (
    'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with calling_engine(tmp_path_factory.mktemp("tools"), 2048) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine: Engine) -> Starlette:
    """A server of it."""
    return make_app(engine)


def saying(text: str) -> dict[str, Any]:
    """A request that is answered with this text."""
    return ASKED | {"guided_regex": re.escape(text), "max_tokens": 400}


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The message of each choice of a stream, with its finish_reason, as OpenAI's clients join them."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            message = found.setdefault(choice["index"], {"content": "", "calls": [], "finish_reason": None})
            message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
            message["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"])
                    assert call["type"] == "function"
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"]["arguments"]
    return found


def whole(response: httpx.Response) -> dict[int, dict[str, Any]]:
    """The same of an answer that is not streamed."""
    assert response.status_code == 200, response.text
    return {
        choice["index"]: {
            "content": choice["message"]["content"] or "",
            "calls": [
                [call["function"]["name"], call["function"]["arguments"]]
                for call in choice["message"].get("tool_calls", ())
            ],
            "finish_reason": choice["finish_reason"],
        }
        for choice in response.json()["choices"]
    }


@pytest.mark.slow
def test_calls_and_content_are_told_apart(app: Starlette) -> None:
    response = post(app, CHAT, saying(SAID))
    message = response.json()["choices"][0]["message"]
    assert whole(response) == {
        0: {
            "content": "I look.",
            "calls": [["get_weather", '{"city": "Rome", "days": 2}'], ["get-time", "{}"]],
            "finish_reason": "tool_calls",
        }
    }
    assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
    assert all(re.fullmatch(r"call_\w+", call["id"]) for call in message["tool_calls"])
    message = post(app, CHAT, saying(SAID.removeprefix("I look.\n"))).json()["choices"][0]["message"]
    assert message["content"] is None
    message = post(app, CHAT, saying("No call.")).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "No call.", "refusal": None}


@pytest.mark.slow
def test_an_answer_ends_with_its_only_call(app: Starlette, engine: Engine) -> None:
    both, first = post(app, CHAT, saying(SAID)), SAID[: SAID.index("</tool_call>")]
    most = engine.tokenizer.encode(first + "</tool_call>", add_special_tokens=False)  # type: ignore[union-attr]
    for more in ({}, {"n": 2}):
        body = saying(SAID) | {"parallel_tool_calls": False, "stream_options": {"include_usage": True}} | more
        chunks = chunks_of(post(app, CHAT, body | {"stream": True}).text)
        del body["stream_options"]
        answer = post(app, CHAT, body)
        n = more.get("n", 1)
        for found in (whole(answer), joined(chunks)):
            assert [found[i]["finish_reason"] for i in range(n)] == ["tool_calls"] * n
            assert [found[i]["calls"] for i in range(n)] == [[["get_weather", '{"city": "Rome", "days": 2}']]] * n
        for usage in (answer.json()["usage"], chunks[-1]["usage"]):
            assert usage["completion_tokens"] <= n * len(most) < n * both.json()["usage"]["completion_tokens"]
    assert whole(post(app, CHAT, saying("No call.") | {"parallel_tool_calls": False}))[0]["content"] == "No call."


CASES = {"none": "No call.", "calls": SAID, "broken": "<tool_call>{no}</tool_call>", "cut": SAID[:-40]}


@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=[pytest.mark.slow] * (name != "none")) for name, text in CASES.items()], ids=CASES
)
def test_a_stream_says_the_same(app: Starlette, text: str) -> None:
    for more in ({}, {"n": 2}, {"parallel_tool_calls": False}, {"logprobs": True, "return_token_ids": True}):
        body = saying(text) | more
        expected = whole(post(app, CHAT, body))
        chunks = chunks_of(post(app, CHAT, body | {"stream": True}).text)
        assert joined(chunks) == expected
        if "logprobs" in more:
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            ids = [token for choice in choices for token in choice.get("token_ids", ())]
            logprobs = [one for choice in choices for one in (choice["logprobs"] or {"content": ()})["content"]]
            assert len(ids) == len(logprobs) == chunks[0].get("usage", {}).get("completion_tokens", len(ids))


@pytest.mark.slow
def test_no_part_of_a_marker_is_streamed(app: Starlette) -> None:
    content = "I look, and look again. " * 6 + "I look."  # a busy machine sends a few tokens at once
    chunks = chunks_of(post(app, CHAT, saying(SAID.replace("I look.", content)) | {"stream": True}).text)
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == content
    assert len([piece for piece in pieces if piece]) > 1  # as it came


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "llama3")) for name in FORMATS if FORMATS[name].guides],
)
def test_required_calls_fit_in_every_format(name: str, engine: Engine) -> None:
    app = make_app(engine, tool_parser=name)
    hot = ASKED | {"temperature": 3.0, "max_tokens": 300}
    for choice in ("required", NAMED):
        body = hot | {"tool_choice": choice, "parallel_tool_calls": False}
        [answer] = whole(post(app, CHAT, body)).values()
        assert joined(chunks_of(post(app, CHAT, body | {"stream": True}).text)) == {0: answer}
        assert answer["content"] == ""
        assert answer["finish_reason"] == "tool_calls"
        [[called, text]] = answer["calls"]
        arguments = json.loads(text)
        if called == "get_weather" or choice == NAMED:
            assert arguments.keys() == {"city", "days"}
            assert arguments["city"] in ("Paris", "Rome")
            assert 1 <= arguments["days"] <= 9
        else:
            assert (called, arguments) == ("get-time", {})


@pytest.mark.longer
def test_the_official_client_calls_a_tool_and_gives_its_result(app: Starlette) -> None:
    openai = pytest.importorskip("openai", reason="the official client needs the reference extra")

    async def use(http: httpx.AsyncClient) -> None:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        first = await client.chat.completions.create(
            model="minillm",
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            max_tokens=200,
            temperature=2,
            seed=1,
        )
        message = first.choices[0].message
        assert message.tool_calls
        messages += [message]
        for call in message.tool_calls:
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "clear"}]
        second = await client.chat.completions.create(
            model="minillm", messages=messages, tools=TOOLS, max_tokens=2, temperature=0
        )
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.prompt_tokens > first.usage.prompt_tokens

    talk(app, use)


@pytest.mark.slow
def test_a_strict_tool_holds_only_its_calls_and_content_may_have_a_schema(app: Starlette) -> None:
    strict = copy.deepcopy(WEATHER)
    strict["function"]["strict"] = True
    hot = ASKED | {"temperature": 2.0, "tools": [strict]}
    plain = post(app, "/tokenize", {"messages": ASKED["messages"], "tools": [WEATHER]}).json()["count"]
    held = post(app, CHAT, hot | {"max_tokens": 8}).json()
    assert held["usage"]["prompt_tokens"] == plain  # the model does not see the word
    assert held["choices"][0]["message"]["content"]
    assert "guided_regex contradicts tools" in error_of(post(app, CHAT, hot | {"guided_regex": "a"}))["message"]
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    seen = set()
    for seed in range(6):
        body = hot | {"response_format": form, "max_tokens": 200, "seed": seed}
        [answer] = whole(post(app, CHAT, body)).values()
        if answer["finish_reason"] != "length":
            assert answer["calls"] or json.loads(answer["content"])["ok"] in (True, False)
        seen.add(bool(answer["calls"]))
    assert seen


def test_choices_among_tools(app: Starlette) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get-time"}}]}
    body = ASKED | {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}, "parallel_tool_calls": False}
    [answer] = whole(post(app, CHAT, body | {"max_tokens": 60})).values()
    assert answer["calls"] == [["get-time", "{}"]]
    counts = {
        choice: post(app, CHAT, ASKED | {"tool_choice": choice, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
        for choice in ("none", "auto")
    }
    without = post(app, CHAT, {"messages": ASKED["messages"], "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    assert counts["none"] == without < counts["auto"]


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no list": ({"tools": {}}, "tools", "expected `array"),
    "no definition": ({"tools": [5]}, "tools", r"tools\[0\] should be"),
    "twice": ({"tools": [WEATHER, WEATHER]}, "tools", "defines 'get_weather' twice"),
    "choice without tools": ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
    "unknown choice": ({"tool_choice": "any"}, "tool_choice", "tool_choice='any': expected"),
    "unknown tool": (
        {"tool_choice": NAMED | {"function": {"name": "f"}}},
        "tool_choice",
        "no tool 'f'; there is get_w",
    ),
    "no name": ({"tool_choice": {"type": "function"}}, "tool_choice", "there is no tool None"),
    "required and a regex": ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex", "contradicts tools"),
    "a result without an id": (
        {"messages": [{"role": "tool", "tool_call_id": {"a": 1}, "content": "x"}]},
        "messages",
        "tool_call_id should be text",
    ),
    "an impossible schema": (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"anyOf": 3}}}],
        },
        "tools",
        "tools was refused by llguidance",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_meant_is_refused_by_name(app: Starlette, name: str) -> None:
    more, param, words = BAD[name]
    error = error_of(post(app, CHAT, ASKED | more))
    assert error["param"] == param
    assert re.search(words, error["message"])


def test_a_format_that_is_not_read_is_refused_and_can_be_set(engine: Engine) -> None:
    before = engine.chat_template
    try:
        engine.chat_template = ChatTemplate("{{ tools }}<tool_call><function=x>{{ messages[0].content }}")
        error = error_of(post(make_app(engine), CHAT, ASKED))
        assert "--tool-parser" in error["message"]
        assert "<function=name>" in error["message"]
        assert post(make_app(engine, tool_parser="json"), CHAT, ASKED | {"max_tokens": 1}).status_code == 200
    finally:
        engine.chat_template = before


def test_tools_count_in_tokenize(app: Starlette) -> None:
    counts = [
        post(app, "/tokenize", {"messages": ASKED["messages"], "tools": tools}).json()["count"]
        for tools in (None, TOOLS)
    ]
    used = post(app, CHAT, ASKED | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
    assert counts[0] < counts[1] == used


# --- fuzz -------------------------------------------------------------------------------------------------------------

ODD: list[Any] = [
    *(None, True, 0, -1, 2**63, 0.5, "", "f", "\x00", "\ud800", "x" * 70, [], {}, [[]], [None], {"a": {"b": []}}),
    *("required", "auto", "none", NAMED, {"type": "object"}, {"$ref": "#"}, {"enum": []}, [{"type": "function"}]),
    *({"type": "string", "pattern": "("}, {"type": "integer", "minimum": 9, "maximum": 1}, '{"a": 1', "<tool_call>"),
]


def spoilt(rng: random.Random, value: Any, share: float) -> Any:
    """A copy with parts replaced, left out or added."""
    if rng.random() < share:
        return rng.choice(ODD)
    if isinstance(value, dict):
        kept = {key: spoilt(rng, part, share) for key, part in value.items() if rng.random() > share / 4}
        extra = {rng.choice(["x", "name", "type", "strict", "id", "parameters"]): rng.choice(ODD)}
        return kept | (extra if rng.random() < share / 2 else {})
    return [spoilt(rng, part, share) for part in value] if isinstance(value, list) else value


def fuzz(app: Starlette, count: int, seed: int) -> dict[int, int]:
    """Statuses of requests with hostile tools, choices and messages."""
    rng, found = random.Random(seed), {}

    def request() -> tuple[str, dict[str, Any]]:
        share = rng.choice([0.0, 0.03, 0.1])
        messages, tools = spoilt(rng, rng.choice([*CONVERSATIONS.values()]), share), spoilt(rng, TOOLS, share)
        choice = rng.choice(["auto", "required", "none", NAMED, *ODD[-6:]])
        more = {rng.choice(["stream", "parallel_tool_calls", "response_format", "n", "x"]): rng.choice(ODD)}
        more = more if rng.random() < 0.2 else {}
        path = rng.choice([CHAT, CHAT, "/v1/responses", "/api/chat"])
        if path == CHAT:
            return path, {"messages": messages, "tools": tools, "tool_choice": choice, "max_tokens": 3} | more
        if path == "/api/chat":
            return path, {
                "model": "minillm",
                "messages": messages,
                "tools": tools,
                "options": {"num_predict": 3},
            } | more
        flat = [
            one if not isinstance(one, dict) else {"type": "function"} | (one.get("function") or {}) for one in TOOLS
        ]
        body = {"input": messages, "tools": spoilt(rng, flat, share), "tool_choice": choice, "max_output_tokens": 3}
        return path, body | more

    async def use(client: httpx.AsyncClient) -> None:
        for _ in range(0, count, 16):
            requests = [request() for _ in range(16)]
            sent = [
                client.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
                for path, body in requests
            ]
            for (path, body), response in zip(requests, await asyncio.gather(*sent), strict=True):
                found[response.status_code] = found.get(response.status_code, 0) + 1
                assert response.status_code < 500, (path, body, response.text)
                if response.status_code >= 400 and path != "/api/chat":
                    error_of(response, response.status_code)

    talk(app, use)
    return found


@pytest.mark.longer
def test_hostile_tools_are_answered_or_refused(app: Starlette) -> None:
    found = fuzz(app, 64, 1)
    assert found[200] > 5
    assert found[400] > 10


@pytest.mark.parametrize(
    "count", [pytest.param(800, marks=pytest.mark.slow), pytest.param(4000, marks=pytest.mark.exhaustive)]
)
def test_many_hostile_tools_are_answered_or_refused(app: Starlette, count: int) -> None:
    fuzz(app, count, 2)
