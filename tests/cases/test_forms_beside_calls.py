"""A form of the answer beside tools is about the final text; a schema is read in the spellings that clients send."""

import json
from typing import Any

import pytest

from minillm.server import make_app

from ..server.client import calling_engine, error_of, post
from .test_calls_cut_short import CHAT, TOOL

pytest.importorskip("llguidance", reason="needs the extra `guided`")

NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"enum": [True]}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"type": "json_object"},
    {"type": "json_object", "schema": SCHEMA},
    {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
]
ASKED = {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 400, "temperature": 0}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with calling_engine(tmp_path_factory.mktemp("forms")) as engine:
        yield make_app(engine)


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
def test_a_required_call_is_made_whatever_form_the_final_text_has(app: Any, form: dict[str, Any]) -> None:
    for choice in ("required", NAMED):
        body = ASKED | {"tools": [TOOL], "tool_choice": choice, "response_format": form, "parallel_tool_calls": False}
        [answer] = post(app, CHAT, body).json()["choices"]
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    flat = {"type": "function", **TOOL["function"]}
    body = {"input": ASKED["messages"], "tools": [flat], "tool_choice": "required", "temperature": 0}
    body |= {"text": {"format": {"type": "json_object"}}, "parallel_tool_calls": False}
    [item] = post(app, "/v1/responses", body).json()["output"]
    assert item["arguments"] == '{"city": "Paris"}'


def test_a_guide_of_the_whole_text_still_contradicts_a_required_call(app: Any) -> None:
    for guide in ({"guided_json": SCHEMA}, {"guided_regex": "a"}):
        body = ASKED | {"tools": [TOOL], "tool_choice": "required"} | guide
        assert "contradicts tools" in error_of(post(app, CHAT, body))["message"]


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_may_stand_in_the_form_itself(app: Any, kind: str) -> None:
    answer = post(app, CHAT, ASKED | {"response_format": {"type": kind, "schema": SCHEMA}})
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"ok": True}
    error = error_of(post(app, CHAT, ASKED | {"response_format": {"type": "text", "schema": SCHEMA}}))
    assert error["param"] == "response_format"
