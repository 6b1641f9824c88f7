"""Calls of tools by the real model, whose template knows none: it reads their definitions as text."""

import json
from typing import Any

import pytest

from minillm import Engine
from minillm.text.chat import call_grammar, read_calls

pytestmark = pytest.mark.real

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize(("city", "days"), [("Paris", 3), pytest.param("Rome", 2, marks=pytest.mark.exhaustive)])
def test_a_required_call_has_the_arguments_of_the_question(city: str, days: int, engine: Engine) -> None:
    assert engine.chat_template is not None
    form = engine.chat_template.call_format
    assert form is not None
    question = [{"role": "user", "content": f"What is the weather in {city} for the next {days} days?"}]
    grammar = call_grammar(form, [WEATHER], engine.tokenizer.added_ids)
    answer = engine.chat(question, tools=[WEATHER], guided_grammar=grammar, max_new_tokens=60)
    [call] = read_calls(answer.text, form, {"get_weather"}).calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": city, "days": days})
