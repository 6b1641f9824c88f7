"""Ollama's API, with its official client where that is installed."""

import asyncio
import json
import random
import re
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.decoding.foreign import OLLAMA, OLLAMA_OPTIONS, ignored, refused, renamed
from minillm.server import make_app

from ..text.chat.conversations import TOOLS
from .client import calling_engine, get, post, talk

pytest.importorskip("llguidance", reason="needs the extra `guided`")

COLD = {"temperature": 0, "num_predict": 6}
TALK = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"model": "minillm", "messages": TALK, "options": COLD}
PROMPTED: dict[str, Any] = {"model": "minillm", "prompt": "Hi", "options": COLD}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with calling_engine(tmp_path_factory.mktemp("ollama")) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine: Engine) -> Starlette:
    """A server of it."""
    return make_app(engine)


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    """The lines of a stream."""
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_is_that_of_openais_api(app: Starlette) -> None:
    chat = post(app, "/v1/chat/completions", {"messages": TALK, "temperature": 0, "max_tokens": 6}).json()
    whole = post(app, "/api/chat", ASKED | {"stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": chat["choices"][0]["message"]["content"]}
    assert (whole["done"], whole["done_reason"]) == (True, "length")
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (chat["usage"]["prompt_tokens"], 6)
    assert 0 < whole["prompt_eval_duration"] < whole["total_duration"]
    assert 0 < whole["eval_duration"] < whole["total_duration"]
    streamed = lines(post(app, "/api/chat", ASKED))  # streams are the default
    assert "".join(line["message"]["content"] for line in streamed) == whole["message"]["content"]
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["eval_count"] == 6
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", whole["created_at"])


def test_generate_applies_the_template_unless_raw(app: Starlette) -> None:
    chat, prompt = (
        post(app, path, body | {"stream": False}).json()
        for path, body in (("/api/chat", ASKED), ("/api/generate", PROMPTED))
    )
    assert prompt["response"] == chat["message"]["content"]
    raw = post(app, "/api/generate", PROMPTED | {"raw": True, "stream": False}).json()
    assert (
        raw["response"]
        == post(app, "/v1/completions", {"prompt": "Hi", "temperature": 0, "max_tokens": 6}).json()["choices"][0][
            "text"
        ]
    )
    system = post(app, "/api/generate", PROMPTED | {"system": "Be brief.", "stream": False}).json()
    assert system["prompt_eval_count"] > prompt["prompt_eval_count"] > raw["prompt_eval_count"]
    assert "".join(line["response"] for line in lines(post(app, "/api/generate", PROMPTED))) == prompt["response"]
    loaded = post(app, "/api/generate", {"model": "minillm:latest"}).json()
    assert (loaded["done_reason"], loaded["response"]) == ("load", "")


@pytest.mark.slow
def test_tools_are_called_with_objects_as_arguments(app: Starlette) -> None:
    """The form of the content leaves nothing but it and calls."""
    body = ASKED | {"tools": TOOLS, "format": {"type": "object", "properties": {}, "additionalProperties": False}}
    for seed in range(20):
        options = {"num_predict": 60, "temperature": 3, "seed": seed}
        whole = post(app, "/api/chat", body | {"stream": False, "options": options}).json()
        if whole["done_reason"] == "stop" and "tool_calls" in whole["message"]:
            break
    calls = whole["message"]["tool_calls"]
    assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
    streamed = lines(post(app, "/api/chat", body | {"options": options}))
    found = [call for line in streamed for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in found] == [call["function"] for call in calls]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [*TALK, said, {"role": "tool", "tool_name": "get_weather", "content": "clear"}]
    counts = [
        post(app, "/api/chat", ASKED | {"messages": chat, "stream": False}).json()["prompt_eval_count"]
        for chat in (TALK, results)
    ]
    assert counts[0] < counts[1]


def test_calls_in_a_stream_come_whole() -> None:
    from minillm.server.ollama import _Reading, _said
    from minillm.server.tools import ToolUse
    from minillm.text.chat import FORMATS, AnswerParser

    use = ToolUse([], FORMATS["hermes"], frozenset({"f", "g"}), False)
    text = 'a <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    text += '<tool_call>{"name": "g", "arguments": {"y": [</tool_call>'
    reading = _Reading(AnswerParser(None, use.parser()))
    pieces = [reading.add(text[i : i + 3], last=i + 3 >= len(text)) for i in range(0, len(text), 3)]
    assert "".join(piece for piece, _, _ in pieces) == "a"
    calls = [call for _, found, _ in pieces for call in found]
    assert [call.name for call in calls] == ["f", "g"]
    said = _said("chat", "", calls)["message"]["tool_calls"]
    assert [call["function"] for call in said] == [
        {"name": "f", "arguments": {"x": 1}},
        {"name": "g", "arguments": {"": '{"y": ['}},
    ]


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "form", ["json", {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}], ids=["json", "schema"]
)
def test_formats(app: Starlette, form: Any) -> None:
    answer = post(
        app,
        "/api/generate",
        PROMPTED | {"format": form, "stream": False, "options": {"num_predict": 200, "temperature": 1, "seed": 3}},
    )
    assert answer.status_code == 200
    if answer.json()["done_reason"] == "stop":
        assert isinstance(json.loads(answer.json()["response"]), dict)


WITNESSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": ({"temperature": 5.0, "seed": 1}, {"temperature": 0.01, "seed": 1}),
    "top_k": ({"temperature": 5.0, "seed": 1, "top_k": 1}, {"temperature": 5.0, "seed": 1}),
    "top_p": ({"temperature": 5.0, "seed": 1, "top_p": 0.01}, {"temperature": 5.0, "seed": 1}),
    "min_p": ({"temperature": 5.0, "seed": 1, "min_p": 0.999}, {"temperature": 5.0, "seed": 1}),
    "typical_p": ({"temperature": 5.0, "seed": 1, "typical_p": 0.01}, {"temperature": 5.0, "seed": 1}),
    "seed": ({"temperature": 5.0, "seed": 1}, {"temperature": 5.0, "seed": 2}),
    "stop": ({"stop": ["a", "e", " ", "t", "o", "\ufffd"]}, {}),
    "repeat_penalty": ({"repeat_penalty": 100.0, "num_predict": 30}, {"num_predict": 30}),
    "presence_penalty": ({"presence_penalty": 100.0, "num_predict": 30}, {"num_predict": 30}),
    "frequency_penalty": ({"frequency_penalty": 100.0, "num_predict": 30}, {"num_predict": 30}),
    "mirostat": ({"temperature": 5.0, "seed": 1, "mirostat": 2, "mirostat_tau": 0.1}, {"temperature": 5.0, "seed": 1}),
    "mirostat_tau": (
        {"temperature": 5.0, "seed": 1, "mirostat": 2, "mirostat_tau": 0.1},
        {"temperature": 5.0, "seed": 1, "mirostat": 2, "mirostat_tau": 9.0},
    ),
    "mirostat_eta": (
        {"temperature": 5.0, "seed": 1, "mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 9.0, "num_predict": 20},
        {"temperature": 5.0, "seed": 1, "mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.01, "num_predict": 20},
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", renamed(OLLAMA_OPTIONS))
def test_an_option_has_an_effect(app: Starlette, name: str) -> None:
    answers = [
        post(app, "/api/generate", PROMPTED | {"stream": False, "options": COLD | options}).json()
        for options in WITNESSES[name]
    ]
    assert all("response" in answer for answer in answers), answers
    assert answers[0]["response"] != answers[1]["response"]


def test_options_about_running_and_neutral_ones_change_nothing(app: Starlette) -> None:
    plain = post(app, "/api/chat", ASKED | {"stream": False}).json()["message"]
    running = dict.fromkeys(ignored(OLLAMA_OPTIONS), 1) | {
        "num_ctx": 512,
        "repeat_last_n": 64,
        "repeat_penalty": 1.0,
        "mirostat": 0,
    }
    running |= {"mirostat_tau": 5.0, "mirostat_eta": 0.1, "min_p": 0.0, "typical_p": 1.0, "tfs_z": 1.0}
    more = {"keep_alive": "5m", "think": False, "options": COLD | running, "format": ""}
    assert post(app, "/api/chat", ASKED | more | {"stream": False}).json()["message"] == plain


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("more", "words"),
    [
        *(({name: ["x"]}, f"{name} is not offered") for name in refused(OLLAMA)),
        ({"think": True}, "does not support thinking"),
        ({"nonsense": 1}, "unknown field 'nonsense'"),
        ({"stream": "yes"}, "stream: expected true or false"),
        ({"format": "xml"}, "format='xml': expected"),
        ({"options": []}, "options: expected an object"),
        ({"options": {"num_ctx": "8k"}}, "options.num_ctx='8k': expected a whole number"),
        ({"options": {"nonsense": 1}}, "options.nonsense is not offered"),
        ({"options": {"num_predict": "x"}}, "options.num_predict"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"mirostat": 3}}, "options.mirostat"),
        ({"top_logprobs": 50}, "top_logprobs=50: this server allows at most 20"),
        ({"logprobs": 1}, "logprobs: expected true or false"),
        ({"prompt": 5}, "prompt: expected text"),
        ({"prompt": None, "system": 5}, "system: expected text"),
        ({"prompt": "", "nonsense": 1}, "unknown field 'nonsense'"),
        ({"prompt": "", "options": {"nonsense": 1}}, "options.nonsense is not offered"),
        ({"prompt": {}}, "prompt: expected text"),
        ({"options": {"temperature": 0, "top_k": "many"}}, "options.top_k='many'"),
        ({"options": {"num_predict": 1.5}}, "options.num_predict=1.5: expected a whole number"),
        ({"prompt": 5, "raw": True}, "prompt: expected text"),
        ({"raw": True, "system": "x"}, "system has no effect"),
        ({"model": "nobody"}, "the model 'nobody' does not exist"),
        ({"model": None}, "model: expected a name"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_in_ollamas_form(app: Starlette, more: dict[str, Any], words: str) -> None:
    response = post(app, "/api/generate", PROMPTED | more)
    assert response.status_code == (404 if "exist" in words else 400)
    assert response.json().keys() == {"error"}
    assert words in response.json()["error"]


def test_what_is_not_offered_is_said_in_ollamas_form_too(app: Starlette) -> None:
    assert post(app, "/api/nothing", {"model": "minillm"}).json() == {"error": "there is nothing at '/api/nothing'"}
    missing = (
        "'/api/embed' is not for the model 'minillm', which has /v1/completions, /v1/chat/completions, /v1/responses"
    )
    assert post(app, "/api/embed", {"model": "minillm"}).json() == {"error": missing}
    assert isinstance(get(app, "/api/generate").json()["error"], str)
    assert post(app, "/api/chat", {"model": "minillm", "message": TALK}).status_code == 400
    assert post(app, "/api/chat", {"model": "minillm", "messages": {}}).status_code == 400


def test_the_models(app: Starlette) -> None:
    [card] = get(app, "/api/tags").json()["models"]
    assert (card["name"], card["model"]) == ("minillm", "minillm")
    assert get(app, "/api/ps").json()["models"][0]["context_length"] == 1024
    shown = post(app, "/api/show", {"model": "minillm:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert "error" in post(app, "/api/show", {"model": "nobody"}).json()
    assert get(app, "/api/version").json().keys() == {"version"}


def test_the_official_client(app: Starlette) -> None:
    ollama = pytest.importorskip("ollama", reason="the official client is not installed")

    async def use() -> None:
        client = ollama.AsyncClient(host="http://test", transport=httpx.ASGITransport(app))
        assert [model.model for model in (await client.list()).models] == ["minillm"]
        whole = await client.chat(model="minillm", messages=TALK, options=COLD, tools=TOOLS)
        pieces = [
            piece
            async for piece in await client.chat(model="minillm", messages=TALK, options=COLD, tools=TOOLS, stream=True)
        ]
        assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
        assert pieces[-1].done_reason == "length"
        assert (await client.generate(model="minillm", prompt="Hi", options=COLD)).eval_count == 6
        with pytest.raises(ollama.ResponseError, match=r"options\.nonsense"):
            await client.generate(model="minillm", prompt="Hi", options={"nonsense": 1})

    asyncio.run(use())


@pytest.mark.slow
def test_hostile_bodies_are_answered_or_refused(app: Starlette) -> None:
    rng = random.Random(4)
    atoms: list[Any] = [
        None,
        True,
        0,
        -1,
        0.5,
        2**70,
        "",
        "a",
        "\ud800",
        "json",
        [],
        {},
        [[]],
        [None],
        {"a": []},
        {"type": "object"},
    ]
    names = [
        "prompt",
        "messages",
        "system",
        "raw",
        "stream",
        "format",
        "options",
        "keep_alive",
        "think",
        "tools",
        "model",
        *refused(OLLAMA),
    ]

    async def use(client: httpx.AsyncClient) -> None:
        for _ in range(4):
            requests = []
            for _ in range(8):
                path, body = rng.choice(
                    [("/api/generate", PROMPTED), ("/api/chat", ASKED), ("/api/show", {"model": "minillm"})]
                )
                options = {
                    rng.choice([*renamed(OLLAMA_OPTIONS), "num_predict", "num_ctx", "repeat_last_n", "x"]): rng.choice(
                        atoms
                    )
                    for _ in range(rng.choice([0, 1, 2]))
                }
                body = body | {"options": {"num_predict": 2} | options}
                requests.append(
                    (path, body | {rng.choice(names): rng.choice(atoms) for _ in range(rng.choice([0, 1, 2]))})
                )
            headers = {"content-type": "application/json"}
            sent = [client.post(path, content=json.dumps(body).encode(), headers=headers) for path, body in requests]
            for request, response in zip(requests, await asyncio.gather(*sent), strict=True):
                assert response.status_code < 500, (request, response.text)

    talk(app, use)
