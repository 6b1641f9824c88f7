"""OpenAI's Responses API, with the official client."""

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.decoding.foreign import API, refused
from minillm.decoding.foreign import RESPONSES as AT_RESPONSES
from minillm.server import make_app
from minillm.server.responses import RESPONSES

from ..text.chat.conversations import TIME, WEATHER
from .client import calling_engine, error_of, post, talk

pytest.importorskip("llguidance", reason="needs the extra `guided`")

T = TypeVar("T")
PATH = "/v1/responses"
TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
SAID = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
HI: dict[str, Any] = {"input": "Hi", "temperature": 0, "max_output_tokens": 6}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with calling_engine(tmp_path_factory.mktemp("responses")) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine: Engine) -> Starlette:
    """A server of it."""
    return make_app(engine)


def with_client(app: Starlette, use: Callable[[Any], Awaitable[T]]) -> T:
    """Use the official client."""
    openai = pytest.importorskip("openai", reason="the official client needs the reference extra")
    return talk(
        app,
        lambda http: use(
            openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=http)
        ),
    )


@pytest.mark.slow
def test_the_client_gets_the_text_that_a_chat_gives(app: Starlette) -> None:
    async def use(client: Any) -> None:
        response = await client.responses.create(
            model="minillm", instructions="Be brief.", input="Hi", temperature=0, max_output_tokens=6
        )
        chat = await client.chat.completions.create(
            model="minillm",
            messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            temperature=0,
            max_completion_tokens=6,
        )
        assert response.output_text == chat.choices[0].message.content
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
        assert response.usage is not None
        assert chat.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert (response.usage.output_tokens, response.usage.total_tokens) == (6, chat.usage.total_tokens)
        ended = await client.responses.create(
            model="minillm", input="Hi", extra_body={"guided_choice": ["yes"]}, metadata={"a": "b"}
        )
        assert (ended.status, ended.output_text, ended.incomplete_details) == ("completed", "yes", None)
        assert (ended.metadata, ended.store, ended.error) == ({"a": "b"}, False, None)

    with_client(app, use)


@pytest.mark.slow
def test_a_call_and_its_result(app: Starlette) -> None:
    async def use(client: Any) -> None:
        asked = {"role": "user", "content": "Weather?"}
        first = await client.responses.create(
            model="minillm", input=[asked], tools=TOOLS, tool_choice={"type": "function", "name": "get_weather"}
        )
        [call] = first.output
        assert call.type == "function_call"
        assert (call.name, call.status) == ("get_weather", "completed")
        assert json.loads(call.arguments).keys() == {"city", "days"}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "clear"}
        second = await client.responses.create(
            model="minillm", input=[asked, *first.output, result], tools=TOOLS, max_output_tokens=1
        )
        chat = await client.chat.completions.create(
            model="minillm",
            max_tokens=1,
            tools=[WEATHER, TIME],
            messages=[
                asked,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": call.call_id,
                            "type": "function",
                            "function": {"name": call.name, "arguments": call.arguments},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": call.call_id, "content": "clear"},
            ],
        )
        assert second.usage is not None
        assert chat.usage is not None
        assert second.usage.input_tokens == chat.usage.prompt_tokens

    with_client(app, use)


def plain(value: Any) -> Any:
    """The items of a response but their ids, and but what the client has added."""
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        added = ("id", "call_id", "parsed", "parsed_arguments")
        return {key: plain(part) for key, part in value.items() if key not in added and part is not None}
    return plain(json.loads(value.model_dump_json())["output"]) if hasattr(value, "output") else value


@pytest.mark.parametrize(
    "said", [pytest.param(SAID, marks=pytest.mark.slow), "No call.", ""], ids=["a call", "text", "nothing"]
)
def test_a_stream_reports_how_the_response_grows(app: Starlette, said: str) -> None:
    body = {"tools": TOOLS, "seed": 1, "temperature": 2} | (
        {"guided_regex": re.escape(said)} if said else {"guided_choice": [" "]}
    )

    async def use(client: Any) -> None:
        whole = await client.responses.create(model="minillm", input="Weather?", extra_body=body)
        events = [
            event
            async for event in await client.responses.create(
                model="minillm", input="Weather?", stream=True, extra_body=body
            )
        ]
        assert [event.sequence_number for event in events] == [*range(len(events))]
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert plain(events[-1].response) == plain(whole)
        grown: dict[str, str] = {}
        for event in events:
            if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                grown[event.item_id] = grown.get(event.item_id, "") + event.delta
            elif event.type == "response.output_text.done":
                assert event.text == grown.get(event.item_id, "")
            elif event.type == "response.function_call_arguments.done":
                assert event.arguments == grown[event.item_id]
            elif event.type == "response.output_item.done":
                assert event.item == events[-1].response.output[event.output_index]
        assert (
            kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(whole.output)
        )
        async with client.responses.stream(model="minillm", input="Weather?", extra_body=body) as stream:
            final = await stream.get_final_response()
        assert plain(final) == plain(whole)

    with_client(app, use)


def test_the_form_of_the_text(app: Starlette) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = post(app, PATH, HI | {"max_output_tokens": 60, "text": {"format": form}}).json()
    assert json.loads(answer["output"][0]["content"][0]["text"]) == {"a": 1}
    assert answer["text"] == {"format": form}


def test_log_probabilities(app: Starlette) -> None:
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [item] = post(app, PATH, HI | more).json()["output"]
    logprobs = item["content"][0]["logprobs"]
    chat = post(
        app,
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "temperature": 0,
            "max_tokens": 6,
            "logprobs": True,
            "top_logprobs": 2,
        },
    ).json()
    assert chat["choices"][0]["logprobs"]["content"] == near(logprobs)
    lines = post(app, PATH, HI | more | {"stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [one for delta in deltas for one in delta] == near(logprobs)


def near(entries: Any) -> Any:
    """The same entries, with numbers that equal others but for rounding: a cached prefix leaves fewer rows."""
    if isinstance(entries, list):
        return [near(entry) for entry in entries]
    if isinstance(entries, dict):
        return {name: near(entry) for name, entry in entries.items()}
    return pytest.approx(entries, abs=1e-4) if isinstance(entries, float) else entries


INPUTS: dict[str, tuple[Any, str]] = {
    "nothing": ([], "input: expected a text, or a list"),
    "a number": (5, "input: expected a text, or a list"),
    "an item of another type": (
        [{"type": "item_reference", "id": "x"}],
        r"input\[0\]: expected a message, .* 'item_reference': nothing is stored: send",
    ),
    "a picture": (
        [{"role": "user", "content": [{"type": "input_image"}]}],
        r"input\[0\]: expected parts .* 'input_image'",
    ),
    "no role": ([{"content": "a"}], r"input\[0\].role: expected system"),
    "a call without a name": (
        [{"type": "function_call", "call_id": "c"}],
        r"input\[0\].name: expected text",
    ),
    "no content": ([{"role": "user", "content": None}], r"input\[0\]: expected a text"),
    "a number for content": ([{"role": "user", "content": 5}], r"input\[0\]: expected a text"),
    "a number in a part": ([{"role": "user", "content": [{"type": "input_text", "text": 5}]}], r"input\[0\]: expected"),
    "an unknown role": ([{"role": "alien", "content": "a"}], r"input\[0\].role: expected system"),
    "a call without an id": ([{"type": "function_call", "name": "f"}], r"input\[0\].call_id: expected text"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_cannot_be_meant_is_named(app: Starlette, name: str) -> None:
    value, words = INPUTS[name]
    assert re.search(words, error_of(post(app, PATH, HI | {"input": value}))["message"])


HERE = refused(AT_RESPONSES)
NAMED = sorted(refused(API).keys() - set(RESPONSES.request.__struct_fields__) | HERE.keys())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*NAMED, "no_such_field", "messages"])
def test_what_is_not_offered_is_refused_by_name(app: Starlette, name: str) -> None:
    error = error_of(post(app, PATH, HI | {name: {"surely": "something"}}))
    assert error["param"] == name
    assert name in error["message"]
    word = RESPONSES.word(name)
    neutral = () if word is None else word.neutral
    for value in (None, False, "", *neutral):
        if name in NAMED:
            assert post(app, PATH, HI | {name: value}).status_code == 200


def test_other_mistakes_are_named(app: Starlette) -> None:
    for more, param in (
        ({"max_output_tokens": "3"}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"form": {}}}, "text"),
        ({"include": ["reasoning.encrypted"]}, "include"),
        ({"tools": ["web_search"]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"model": "nobody"}, "model"),
    ):
        assert error_of(post(app, PATH, HI | more), 404 if param == "model" else 400)["param"] == param


@pytest.mark.longer
def test_hostile_bodies_are_answered_or_refused(app: Starlette) -> None:
    rng = random.Random(3)
    atoms: list[Any] = [
        None,
        True,
        0,
        -1,
        0.5,
        "",
        "a",
        "\ud800",
        [],
        {},
        [[]],
        {"type": "message"},
        {"type": 3},
        {"format": []},
    ]
    items: list[Any] = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"},
    ]
    items += [{"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": 3}]}, *atoms]
    names = [
        "instructions",
        "text",
        "tools",
        "tool_choice",
        "metadata",
        "include",
        "top_logprobs",
        "stream",
        "temperature",
    ]
    names += ["parallel_tool_calls", "reasoning", "truncation", "store", "model", "user", *NAMED]

    async def use(client: httpx.AsyncClient) -> None:
        for _ in range(15):
            bodies = []
            for _ in range(8):
                body = {"input": rng.choice(["a", rng.choices(items, k=2), rng.choice(atoms)]), "max_output_tokens": 2}
                bodies.append(body | {rng.choice(names): rng.choice(atoms) for _ in range(rng.choice([0, 1, 2]))})
            headers = {"content-type": "application/json"}
            sent = [client.post(PATH, content=json.dumps(body).encode(), headers=headers) for body in bodies]
            for body, response in zip(bodies, await asyncio.gather(*sent), strict=True):
                assert response.status_code < 500, (body, response.text)

    talk(app, use)
