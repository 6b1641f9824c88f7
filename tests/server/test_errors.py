"""Hostile and mistaken requests: an answer of 400 or so in OpenAI's shape, in one line, never of 500."""

import asyncio
import json
import logging
import random
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.decoding.fields import FIELDS
from minillm.decoding.foreign import API, WORDS
from minillm.errors import NumericalError

from .client import error_of, get, post, talk

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TALK = [{"role": "user", "content": "Hi"}]

BODIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not valid JSON"),
    "no JSON": (b"{prompt: 1}", "not valid JSON"),
    "cut off": (b'{"prompt": "a"', "not valid JSON"),
    "an array": (b"[]", "JSON object"),
    "a text": (b'"prompt"', "JSON object"),
    "null": (b"null", "JSON object"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "NaN"),
    "infinity": (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity"),
    "infinite": (b'{"prompt": "a", "temperature": 1e999}', "too large"),
    "huge": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "too many digits"),
    "deep": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "no UTF-8": (b'{"prompt": "\xff"}', "byte 12 is not"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "UTF-8"),
    "a mark": (b'\xef\xbb\xbf{"prompt": "a"}', "not valid JSON"),
    "twice": (b'{"prompt": "a", "n": 1, "n": 2}', "'n' occurs twice"),
    "twice inside": (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "'1' occurs twice"),
    "half a pair": (b'{"prompt": "\\ud800"}', "surrogate"),
    "half a pair in a name": (b'{"prompt": "a", "x\\uDfff": 1}', "surrogate"),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_is_no_request(app: Starlette, name: str) -> None:
    body, words = BODIES[name]
    error = error_of(post(app, COMPLETIONS, body))
    assert words in error["message"]


VALUES: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, {"prompt": [99999]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**30]}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 600}, "prompt"),
    (COMPLETIONS, {"prompt": "a " * 600}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": True}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "top_p": -0.1}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "top_p": 1.1}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a", ""]}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 10**40}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 600}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_new_tokens": 600}, "max_new_tokens"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": True}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 129}, "n"),
    *(
        (COMPLETIONS, {"prompt": "a", "temperature": 0, name: value}, name)
        for name, value in {"top_p": "x", "top_k": "many", "min_p": -5, "seed": 1.5, "typical_p": 7}.items()
    ),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids"),
    *((CHAT, {"messages": [{"role": role, "content": "a"}]}, "messages") for role in ("alien", "", "e", "User")),
    (CHAT, {"messages": TALK, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [10**6], "ignore_eos": True}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1e300}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "best_of": 500}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "best_of": True}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "num_beams": 1000}, "num_beams"),
    (COMPLETIONS, {"prompt": "a", "logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**64}, "seed"),
    (COMPLETIONS, {"prompt": "a", "seed": -(2**64)}, "seed"),
    (COMPLETIONS, {"prompt": "a", "seed": 1.0}, "seed"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"²": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (COMPLETIONS, {"prompt": "a", "model": 5}, "model"),
    (COMPLETIONS, {"prompt": "a", "priority": 2**80}, "priority"),
    (COMPLETIONS, {"prompt": "a", "timeout": 0}, "timeout"),
    (COMPLETIONS, {"prompt": "a", "timeout": True}, "timeout"),
    (COMPLETIONS, {"prompt": "a", "lora": "none"}, "lora"),
    (COMPLETIONS, {"prompt": "a", "guided_regex": "("}, "guided_regex"),
    (COMPLETIONS, {"prompt": "a", "guided_json": {"type": "nothing"}}, "guided_json"),
    (COMPLETIONS, {"prompt": "a", "num_beams": 3, "mirostat": 2, "do_sample": True}, "num_beams"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, None),
    (CHAT, {"messages": "Hi"}, "messages"),
    (CHAT, {"messages": ["Hi"]}, None),
    (CHAT, {"messages": [{}]}, None),
    (CHAT, {"messages": [{"role": "user"}]}, None),
    (CHAT, {"messages": [{"role": 5, "content": "a"}]}, None),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, None),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, None),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}]}, None),
    (CHAT, {"messages": TALK, "add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
    (CHAT, {"messages": TALK, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": TALK, "response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {"messages": TALK, "response_format": {}}, "response_format.type"),
    (CHAT, {"messages": TALK, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, None),
    (CHAT, {"messages": TALK, "top_logprobs": 2, "logprobs": False}, "top_logprobs"),
    (CHAT, {"messages": TALK, "top_logprobs": 50}, "top_logprobs"),
    (CHAT, {"messages": TALK, "max_tokens": 3, "max_completion_tokens": 3}, "max_completion_tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 2000}]}, None),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": TALK}, "prompt"),
    ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
    ("/tokenize", {"prompt": "a", "what": 1}, "what"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
    ("/detokenize", {"tokens": [10**25]}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, None),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("path", "body", "param"), VALUES, ids=[json.dumps(body)[:60] for _, body, _ in VALUES])
def test_a_mistake_is_named_in_the_request_s_words(
    app: Starlette, path: str, body: dict[str, Any], param: str | None
) -> None:
    error = error_of(post(app, path, body))
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param and param.split(".")[0] in error["message"], error
    assert not {"max_new_tokens", "num_return_sequences", "stop_strings"} - body.keys() & set(
        error["message"].replace("=", " ").split()
    )


def test_paths_and_methods(app: Starlette) -> None:
    assert error_of(get(app, "/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(post(app, "/v1/embeddings", {"input": "a"}), 404)["code"] == "not_found"
    assert error_of(get(app, "/v1/models/nobody"), 404)["code"] == "model_not_found"
    response = get(app, COMPLETIONS)
    assert error_of(response, 405) and response.headers["allow"] == "POST"
    head = talk(app, lambda client: client.head("/health"))
    assert head.status_code == 200 and not head.content
    options = talk(app, lambda client: client.options(COMPLETIONS))
    assert options.status_code == 405 and options.headers["allow"] == "POST"


def test_bodies_must_be_declared_as_json(app: Starlette) -> None:
    """All but curl's, which calls them a form where it is told nothing; a page of another site might as well."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = b'{"prompt": "a", "max_tokens": 1}'
    for header in (
        {"content-type": "text/plain"},
        form | {"origin": "http://other"},
        form | {"sec-fetch-site": "none"},
    ):
        error = error_of(post(app, COMPLETIONS, body, headers=header), 415)
        assert "application/json" in error["message"]
    assert post(app, COMPLETIONS, body, headers=form).status_code == 200


def test_a_model_without_a_template_has_no_chat(demo: Engine, app: Starlette) -> None:
    template, demo.chat_template = demo.chat_template, None
    try:
        assert "/v1/completions" in error_of(post(app, CHAT, {"messages": TALK}))["message"]
    finally:
        demo.chat_template = template


# --- failures inside --------------------------------------------------------------------------------------------------

HARD = {"type": "array", "items": {"anyOf": [{"type": "string", "maxLength": 1}] * 400}}
"""A schema that passes as long as nothing is generated by it."""


@pytest.mark.longer
def test_a_failure_in_a_step_is_that_request_s_alone(
    demo: Engine, app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_for_seven(*arguments: Any) -> Any:
        raise NumericalError("the logits contain NaN")

    async def use(client: httpx.AsyncClient) -> list[httpx.Response]:
        bad = {"prompt": "a", "max_tokens": 20, "guided_regex": "[0-9]+"}
        good = {"prompt": "A list of colors: red,", "max_tokens": 20, "temperature": 0}
        return await asyncio.gather(*(client.post(COMPLETIONS, json=body) for body in (good, bad, good)))

    failures = app.state.server.metrics.model(app.state.server.fixed["demo"]).finished
    before = failures["error"], failures["abort"]
    alone = post(app, COMPLETIONS, {"prompt": "A list of colors: red,", "max_tokens": 20, "temperature": 0}).json()
    monkeypatch.setattr("minillm.decoding.guided.Guide.push", fails_for_seven)
    first, failed, last = talk(app, use)
    error = error_of(failed, 500)
    assert error["code"] == "internal_error" and "NaN" in error["message"]
    for response in (first, last):
        assert response.json()["choices"] == alone["choices"]
    assert (failures["error"], failures["abort"]) == (before[0] + 1, before[1])
    # in a stream, what came before it stays
    monkeypatch.undo()
    calls = []
    push = "minillm.decoding.guided.Guide.push"
    from minillm.decoding.guided import Guide

    original = Guide.push

    def fails_later(self: Guide, token: int) -> None:
        calls.append(token)
        if len(calls) > 3:
            raise NumericalError("the logits contain NaN")
        original(self, token)

    monkeypatch.setattr(push, fails_later)
    body = {"prompt": "a", "max_tokens": 20, "guided_regex": "[0-9]{12}", "stream": True}
    response = post(app, COMPLETIONS, body)
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert response.status_code == 200 and lines[-1] == "data: [DONE]"
    assert "NaN" in json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-2]]
    assert "".join(pieces).isdigit()


def test_a_bug_is_one_line_for_the_client_and_one_in_the_log(
    app: Starlette, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError("secret text")

    monkeypatch.setattr("minillm.server.text_generation.read_prompts", broken)
    response = post(app, COMPLETIONS, {"prompt": "a"}, headers={"X-Request-Id": "me"})
    assert "secret" not in error_of(response, 500)["message"] and response.headers["x-request-id"] == "me"
    [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "request me failed: ZeroDivisionError" in record.getMessage() and record.exc_info is None


# --- fuzz -------------------------------------------------------------------------------------------------------------

ATOMS: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 10**9, 2**63, 2**64, -(2**70), 0.0, 0.5, 1.0, -0.1, 1e300, 1e-320),
    *("", "a", "\x00", "\ud800", "日", "never", "[0-9]", "start: ", '{"type":"string"}', "x" * 300),
    *([], {}, [[]], [1, 2], ["a"], [[1, 2]], [["a"]], {"1": 1}, {"a": {"b": []}}, [[[5], 1.0]], [None]),
    *({"type": "text"}, {"type": "json_object"}, {"type": "object"}, {"include_usage": True}),
]
MESSAGES: list[Any] = [
    *({"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "assistant", "content": None}),
    *({"role": "user", "content": [{"type": "text", "text": "c"}]}, {"role": "tool", "content": "d"}, {}, None, 5),
]
NAMES = [
    *FIELDS,
    *WORDS[API],
    *("model", "stream", "stream_options", "logit_bias", "user", "ignore_eos", "stop_token_ids", "use_beam_search"),
    *("priority", "timeout", "return_token_ids", "return_tokens_as_token_ids", "best_of", "add_special_tokens"),
    *("response_format", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "whatever"),
]


def hostile(random: random.Random) -> tuple[str, bytes]:
    """A path and a body, most of it valid JSON."""
    path = random.choice((COMPLETIONS, COMPLETIONS, CHAT, "/tokenize", "/detokenize"))
    body: dict[str, Any] = {"max_tokens": random.choice((1, 2, 3))} if path in (COMPLETIONS, CHAT) else {}
    for name in random.sample(NAMES, random.choice((0, 1, 1, 2, 3))):
        body[name] = random.choice(ATOMS)
    if random.random() < 0.9:
        body["prompt" if path == COMPLETIONS else "tokens" if path == "/detokenize" else "messages"] = random.choice(
            [random.choice(ATOMS), "Hello", [40, 41], [*random.choices(MESSAGES, k=random.choice((1, 2)))]]
        )
    text = json.dumps(body).encode()
    if random.random() < 0.1:
        at = random.randrange(len(text) + 1)
        text = text[:at] + bytes([random.randrange(256)]) + text[at + random.choice((0, 1)) :]
    return path, text


def fuzz(app: Starlette, count: int, seed: int) -> dict[int, int]:
    """Number of responses by status."""
    found: dict[int, int] = {}
    rng = random.Random(seed)

    async def use(client: httpx.AsyncClient) -> None:
        for _ in range(0, count, 16):
            requests = [hostile(rng) for _ in range(16)]
            headers = {"content-type": "application/json"}
            responses = await asyncio.gather(
                *(client.post(path, content=body, headers=headers) for path, body in requests)
            )
            for (path, body), response in zip(requests, responses, strict=True):
                found[response.status_code] = found.get(response.status_code, 0) + 1
                assert response.status_code < 500, (path, body, response.text)
                if response.status_code >= 400:
                    error_of(response, response.status_code)

    talk(app, use)
    return found


@pytest.mark.slow
def test_random_bodies(app: Starlette) -> None:
    found = fuzz(app, 320, seed=0)
    assert found[200] > 10 and found[400] > 50


@pytest.mark.parametrize(
    "count", [pytest.param(2_000, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.exhaustive)]
)
def test_thousands_of_random_bodies(demo: Engine, app: Starlette, count: int) -> None:
    answers = fuzz(app, count, seed=1)
    assert answers[200] > 0.03 * count and answers[400] > 0.2 * count
    assert not demo.busy
