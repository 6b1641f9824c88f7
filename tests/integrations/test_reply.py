"""Answers for other tools: thoughts, text and calls apart, and the fields that requests need."""

from types import SimpleNamespace
from typing import Any

import pytest

from minillm import Engine
from minillm.decoding.event import Event
from minillm.errors import ParameterError, PromptError
from minillm.integrations.reply import Reply, embed, fields_of_calls, sampling_fields
from minillm.text.chat import FORMATS, REASONING_FORMATS

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
USER = [{"role": "user", "content": "Rome?"}]


class Scripted:
    """An engine whose answer is given, a character at a time."""

    tokenizer, generation_defaults = None, {"max_new_tokens": 9}

    def __init__(self, text: str, reason: str = "stop", **template: Any) -> None:
        self.text, self.reason, self.fields = text, reason, dict[str, Any]()
        self.chat_template = SimpleNamespace(**{"call_format": None, "reasoning_format": None} | template)

    def render_chat(self, messages: Any, **_: Any) -> str:
        return "Rome?"

    def stream_chat(self, messages: Any, **fields: Any) -> Any:
        self.fields = fields
        for index, letter in enumerate(self.text, 1):
            yield Event(0, 0, letter, (index,), finish_reason=self.reason if index == len(self.text) else None)


def test_thoughts_text_and_calls_are_apart() -> None:
    text = '<think>hm</think>It is.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    form = next(form for form in REASONING_FORMATS.values() if form.begin == "<think>")
    engine = Scripted(text, call_format=FORMATS["hermes"], reasoning_format=form)
    reply = Reply(engine, USER, tools=[TOOL])  # type: ignore[arg-type]
    assert len(list(reply)) > 5
    [call] = reply.answer.calls
    assert (reply.answer.reasoning, reply.answer.content) == ("hm", "It is.")
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
    assert reply.completion.text == text and len(reply.completion.token_ids) == len(text)


def test_no_tool_is_offered_where_none_may_be_called() -> None:
    engine = Scripted("Yes.", call_format=FORMATS["hermes"])
    assert [delta.text for delta in Reply(engine, USER, tools=[TOOL], choice="none")] == [*"Yes."]  # type: ignore
    assert engine.fields["tools"] is None


def test_a_grammar_holds_the_calls_that_have_to_be() -> None:
    engine: Any = SimpleNamespace(tokenizer=None, chat_template=None)
    assert fields_of_calls(engine, FORMATS["hermes"], [TOOL]) == {}
    assert "weather" in fields_of_calls(engine, FORMATS["hermes"], [TOOL], "required")["guided_grammar"]


def test_calls_that_are_not_read_are_refused_by_name() -> None:
    engine = Scripted("", unread_calls="pythonic")
    with pytest.raises(ParameterError, match="minillm does not read the calls of this model, pythonic"):
        Reply(engine, USER, tools=[TOOL])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"temperature": None, "max_new_tokens": 3}, {"max_new_tokens": 3}),
        ({"temperature": 0, "top_p": 0.5, "seed": 1, "max_new_tokens": 3}, {"max_new_tokens": 3, "do_sample": False}),
        ({"top_p": 0.5}, {"top_p": 0.5, "do_sample": True}),
    ],
)
def test_any_field_of_sampling_asks_for_it_and_a_temperature_of_0_for_none(given: Any, fields: Any) -> None:
    assert sampling_fields(**given) == fields


@pytest.mark.parametrize("texts", ["abc", [3], 3, None, [None]])
def test_what_is_no_list_of_texts_has_no_vectors(texts: Any) -> None:
    with Engine(progress=False) as engine, pytest.raises(PromptError, match="expected a list of texts, found"):
        embed(engine, texts, "document")
