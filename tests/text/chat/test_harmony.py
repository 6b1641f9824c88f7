"""Harmony: thoughts, content and calls of gpt-oss, in pieces of any size; and what its template writes is read back."""

import json
import random
from typing import Any

import pytest

from minillm.errors import ParameterError
from minillm.text.chat import FORMATS, REASONING_FORMATS, Answer, AnswerParser, call_grammar, parser_of, read_calls
from minillm.text.chat.calls import ArgumentsDelta, CallBegin, ContentDelta, ReasoningDelta

from ...conversations import assistant, user
from .conversations import TOOLS, call, result, template

HARMONY = FORMATS["harmony"]
START, HM = "<|start|>assistant", "<|channel|>analysis<|message|>Hm, 1 < 2.<|end|>"
TO = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
Read = tuple[str, str, list[tuple[str, str]]]
CASES: dict[str, tuple[str, Read]] = {
    "an answer": (f"{HM}{START}<|channel|>final<|message|>Yes.<|return|>", ("Hm, 1 < 2.", "Yes.", [])),
    "no thoughts": ("<|channel|>final<|message|>Yes.", ("", "Yes.", [])),
    "a call": (f'{HM}{START}{TO}{{"a": "<|x"}}<|call|>', ("Hm, 1 < 2.", "", [("f", '{"a": "<|x"}')])),
    "the recipient first": (
        f'{HM}{START} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}<|call|>',
        ("Hm, 1 < 2.", "", [("f", '{"a": 1}')]),
    ),
    "at once, without its marker": (
        ' to=functions.f<|channel|>commentary<|message|>{"a": 1}',
        ("", "", [("f", '{"a": 1}')]),
    ),
    "words before a call": (
        f"{HM}{START}<|channel|>commentary<|message|>I look.<|end|>{START}{TO}{{}}<|call|>",
        ("Hm, 1 < 2.", "I look.", [("f", "{}")]),
    ),
    "thoughts between": (
        f"{HM}{START}<|channel|>commentary<|message|>I look.<|end|>{START}<|channel|>analysis<|message|>So?<|end|>"
        f"{START}<|channel|>final<|message|>Yes.<|return|>",
        ("Hm, 1 < 2.\n\nSo?", "I look.\n\nYes.", []),
    ),
    "two calls": (
        f'{START}{TO}{{"a": 1}}<|call|>{START} to=functions.g<|channel|>commentary<|message|><|call|>',
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "a tool of its own": (
        '<|channel|>analysis to=browser.search code<|message|>{"q": "x"}<|call|>',
        ("", "", [("browser.search", '{"q": "x"}')]),
    ),
    "no harmony": ("Yes <b>and</b> no.", ("", "Yes <b>and</b> no.", [])),
    "an end that is left out": (f"<|channel|>commentary<|message|>a{START}{TO}{{}}", ("", "a", [("f", "{}")])),
    "broken arguments": (f"{TO}{{city: <|call|>", ("", "", [("f", "{city: ")])),
}


def parser(*, single: bool = False, thoughts: bool = True) -> AnswerParser:
    reasoning = REASONING_FORMATS["harmony"].parser() if thoughts else None
    return AnswerParser(reasoning, parser_of(HARMONY, {"f"}, single=single))


def seen(answer: Answer) -> Read:
    return answer.reasoning, answer.content, [(one.name, one.arguments) for one in answer.calls]


@pytest.mark.parametrize("name", CASES)
def test_a_text_is_read_the_same_however_it_is_cut(name: str) -> None:
    (text, expected), draw = CASES[name], random.Random(1)
    assert seen(parser().read(text)) == expected
    for longest in (1, *[7] * 40):
        ours, answer, at = parser(), Answer(), 0
        while at < len(text):
            size = draw.randint(1, longest)
            answer.add(ours.push(text[at : at + size]))
            at += size
        answer.add(ours.finish())
        assert seen(answer) == expected


def test_thoughts_content_and_arguments_stream_as_they_come() -> None:
    ours = parser()
    assert ours.push("<|channel|>analysis<|mess") == []
    assert ours.push("age|>Hm <") == [ReasoningDelta("Hm ")]
    assert ours.push(f"b<|end|>{START}<|channel|>commentary to=functions.f<|message|>") == [ReasoningDelta("<b")]
    assert not ours.called
    begin, *rest = ours.push('{"a')
    assert isinstance(begin, CallBegin) and (begin.name, rest) == ("f", [ArgumentsDelta(0, '{"a')])
    assert ours.push('": 1}<|ca') == [ArgumentsDelta(0, '": 1}')]
    assert ours.push(f"ll|>{START}<|channel|>final<|message|>Y") == [ContentDelta("Y")]
    assert ours.finish() == []


def test_a_text_that_is_cut_off_shows_no_part_of_a_marker() -> None:
    text = f'{HM}{START}<|channel|>commentary<|message|>I look.<|end|>{START}{TO}{{"a": 1}}<|call|>'
    for end in range(len(text)):
        reasoning, content, calls = seen(parser().read(text[:end], cut=True))
        assert "Hm, 1 < 2.".startswith(reasoning) and "I look.".startswith(content)
        assert not calls or (calls[0][0] == "f" and '{"a": 1}'.startswith(calls[0][1]))


def test_no_grammar_is_made_of_it() -> None:
    with pytest.raises(ParameterError, match="calls in the format harmony are held by no grammar"):
        call_grammar(HARMONY, TOOLS, {})


def test_one_call_is_kept_where_one_is_wanted() -> None:
    ours = parser(single=True)
    answer = Answer()
    answer.add(ours.push(CASES["two calls"][0]))
    assert ours.done and seen(answer) == ("", "", [("f", '{"a": 1}')])
    assert ours.push("more") == [] and ours.finish() == []


def test_thoughts_are_content_where_they_are_not_told_apart_and_may_be_begun_by_the_prompt() -> None:
    assert seen(parser(thoughts=False).read(f"{HM}{START}{TO}{{}}<|call|>")) == ("", "Hm, 1 < 2.", [("f", "{}")])
    opened = AnswerParser(REASONING_FORMATS["harmony"].parser(opened=True), parser_of(HARMONY, {"f"}))
    assert seen(opened.read(f"Hm<|end|>{START}{TO}{{}}<|call|>")) == ("Hm", "", [("f", "{}")])


def test_a_turn_with_thoughts_words_and_a_call_is_read_back_as_the_template_wrote_it() -> None:
    ours, before = template("harmony"), [user("Weather?")]
    assert ours.call_format is HARMONY and ours.reasoning_format is REASONING_FORMATS["harmony"]
    arguments = {"city": 'Rome "x"\n日本', "days": 2}
    turn: dict[str, Any] = assistant("I look.", tool_calls=[call("get_weather", arguments)])
    turn["reasoning_content"] = "Which city?"
    prompt = ours.render(before, tools=TOOLS)
    said = ours.render([*before, turn], tools=TOOLS, add_generation_prompt=False)
    assert said.startswith(prompt)
    answer = parser().read(said[len(prompt) :])
    assert (answer.reasoning, answer.content) == ("Which city?", "I look.")
    assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == [("get_weather", arguments)]
    further = ours.render([*before, turn, result("clear")], tools=TOOLS)
    assert further.startswith(said) and "<|start|>functions.get_weather to=assistant" in further
    assert read_calls(said[len(prompt) :], HARMONY, {"get_weather"}).calls[0].name == "get_weather"
