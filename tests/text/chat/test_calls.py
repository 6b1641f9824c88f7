"""Tool calls in a model's text: each format, however the text is cut into pieces; and texts that are no calls."""

import json
import random
from itertools import combinations, pairwise
from typing import Any

import pytest

from minillm.text.chat import FORMATS, Answer, CallFormat, CallParser, read_calls
from minillm.text.chat.calls import ArgumentsDelta, CallBegin, ContentDelta, format_of, unread_format

from ...conversations import assistant
from .conversations import NAMES, TOOLS, call, template

OFFERED = {"f", "get_weather", "get-time", "typed"}
SCHEMAS: dict[str, Any] = {
    "typed": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "half": {"type": "number"},
            "flag": {"type": "boolean"},
            "list": {"type": "array"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "unit": {"$ref": "#/$defs/unit"},
            "n": {"type": ["array", "null"]},
        },
        "$defs": {"unit": {"enum": ["m", "km"]}},
    },
}
SCHEMAS["get_weather"] = SCHEMAS["typed"]
Read = tuple[str, list[tuple[str, str]]]


def seen(answer: Answer) -> Read:
    """Content, and name and arguments of each call."""
    return answer.content, [(call.name, call.arguments) for call in answer.calls]


# Format, text, what is read.
CASES: list[tuple[str, str, Read]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ("", [("f", '{"a": 1}')])),
    (
        "hermes",
        'I look.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"arguments": '
        '{"s": "}</tool_call>\\"{"}, "name": "g"}\n</tool_call>\n',
        ("I look.", [("f", "{}"), ("g", '{"s": "}</tool_call>\\"{"}')]),
    ),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":[1,{"b":null}]}} then more ', (
        "then more ", [("f", '{"a":[1,{"b":null}]}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', ("", [("f", '{"a": "x\\ny"}')])),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call> a', ("a", [("f", "{}")])),
    ("hermes", "a < b <tool_", ("a < b <tool_", [])),
    (
        "glm",
        "Now.<tool_call>f<arg_key>a</arg_key><arg_value>x\n<b></arg_value></tool_call><tool_call>get-time\n</tool_call>",
        ("Now.", [("f", '{"a": "x\\n<b>"}'), ("get-time", "{}")]),
    ),
    (
        "glm",
        "<tool_call>typed\n<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n<arg_key>list</arg_key>\n<arg_value>[1]"
        "</arg_value>\n</tool_call>",
        ("", [("typed", '{"count": 3, "list": [1]}')]),
    ),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="typed">\n<parameter name="text">\na</parameter>\n<parameter name="flag">'
        'true</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call> done',
        ("done", [("typed", '{"text": "\\na", "flag": true}'), ("f", "{}")]),
    ),
    ("lfm2", "<|tool_call_start|>[f(a='x', b=[1, None], c=true)]<|tool_call_end|>ok", (
        "ok", [("f", '{"a": "x", "b": [1, null], "c": true}')])),
    ("lfm2", '<|tool_call_start|>f(from="a, b)", n=-1.5)<|tool_call_end|>', (
        "", [("f", '{"from": "a, b)", "n": -1.5}')])),
    ("lfm2", "a<|tool_call_start|>[f(open('x'))]<|tool_call_end|>", (
        "a<|tool_call_start|>[f(open('x'))]<|tool_call_end|>", [])),
    ("llama4", "[f(a=1), get-time()]", ("", [("f", '{"a": 1}'), ("get-time", "{}")])),
    ("llama4", "<|python_start|>[f(a={'b': 1})]", ("", [("f", '{"a": {"b": 1}}')])),
    ("llama4", "[1, 2, 3] are numbers", ("[1, 2, 3] are numbers", [])),
    ("llama4", "[other(a=1)]", ("[other(a=1)]", [])),
    (
        "deepseek",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("Hm.", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": 1}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        ("", [("f", '{"a": 1}')]),
    ),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>',
        ("", [("f", '{"a": 1}')]),
    ),
    ("hermes", " spaces \n ", (" spaces \n ", [])),
    ("hermes", "a <tool_call>{bad}</tool_call> b", ("a <tool_call>{bad}</tool_call> b", [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {city: 1}}</tool_call>', (
        '<tool_call>{"name": "f", "arguments": {city: 1}}</tool_call>', [])),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', (
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>', [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
    ("hermes", '<tool_call>{"name": "f", "argu', ("", [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', ("", [("f", '{"a": 1}')])),
    ("hermes", 'a <tool_call>{"name": "f"}}]}\n</tool_call></tool_call>} b', ("a b", [("f", "{}")])),
    ("hermes", 'a <tool_call>{"name": "f", "arguments": {"a": ]} </tool_call> b', ("a b", [("f", '{"a": ]}')])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, oops}</tool_call>a<tool_call>{"name": "g"}</tool_call>', (
        "a", [("f", "{}"), ("g", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, oops}</tool', ("", [("f", "{}")])),
    ("llama3", '{"name": "f", "parameters": {}, oops} a', ("oops} a", [("f", "{}")])),
    ("llama3", '{"name": "f", "parameters": {"a": "b; {"}}', ("", [("f", '{"a": "b; {"}')])),
    ("llama3", ' <|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "get_weather", '
     '"parameters": {"x": -1e3}}', ("", [("f", "{}"), ("get_weather", '{"x": -1e3}')])),
    ("llama3", 'Hello. {"name": "f", "parameters": {}}', ('Hello. {"name": "f", "parameters": {}}', [])),
    ("llama3", ' {"name": "Bob", "parameters": {}}', (' {"name": "Bob", "parameters": {}}', [])),
    ("llama3", '{"answer": {"name": "f"}}', ('{"answer": {"name": "f"}}', [])),
    ("llama3", '<|python_tag|>print("x")', ('<|python_tag|>print("x")', [])),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}, "id": "x"}]', (
        "", [("f", '{"a": "]"}'), ("g", "{}")])),
    ("mistral", "Well[TOOL_CALLS]f[ARGS]{\"a\": 1}", ("Well", [("f", '{"a": 1}')])),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"na', ("", [("f", '{"a": 1}')])),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}}, {"name": "g", "arguments": {}}}]]} a', (
        "a", [("f", "{}"), ("g", "{}")])),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}] a', ("a", [("f", "{}")])),
    ("llama3", '{"name": "f", "parameters": {}}}', ("", [("f", "{}")])),
    ("llama3", '{"name": "f", "parameters": {}}}; {"name": "f"}', ("", [("f", "{}"), ("f", "{}")])),
    ("llama3", '{"name": "fg", "parameters": {}}', ('{"name": "fg", "parameters": {}}', [])),
    ("mistral", "[TOOL_CALLS] I will", ("[TOOL_CALLS] I will", [])),
    ("mistral-v11", '[TOOL_CALLS]f[ARGS]{"a": {}}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}', (
        "", [("f", '{"a": {}}'), ("g", "{}")])),
    ("mistral-v11", 'ok [TOOL_CALLS]f{"a": 1}', ("ok", [("f", '{"a": 1}')])),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', ("", [("f", '{"a": 1}')])),
    ("phi4", '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>', ("", [("f", "{}")])),
    ("qwen3-coder", "I look.\n<tool_call>\n<function=typed>\n<parameter=text>\na <b>\n</par\n\n</parameter>\n"
     "<parameter=count>\n3\n</parameter>\n<parameter=flag>\nTrue\n</parameter>\n<parameter=list>\n[1, {\"a\": null}]"
     "\n</parameter>\n</function>\n</tool_call>", ("I look.", [("typed", '{"text": "a <b>\\n</par\\n", "count": 3, '
     '"flag": true, "list": [1, {"a": null}]}')])),
    ("qwen3-coder", "<tool_call>\n<function=typed>\n<parameter=maybe>\nNone\n</parameter>\n<parameter=count>\nmany\n"
     "</parameter>\n<parameter=other>\n5\n</parameter>\n<parameter=unit>\nm\n</parameter>\n<parameter=unit>\nkm\n"
     "</parameter>\n<parameter=half>\n1.50\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n</function>"
     "\n</tool_call>", ("", [("typed", '{"maybe": null, "count": "many", "other": "5", "unit": "m", "half": 1.50}'),
     ("f", "{}")])),
    ("qwen3-coder", "<function=f><parameter=a>x</parameter><parameter=b></parameter></function></tool_call> b", (
        "b", [("f", '{"a": "x", "b": ""}')])),
    ("qwen3-coder", "<function=unknown>\n</function>", ("<function=unknown>\n</function>", [])),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\nx</para", ("", [("f", '{"a": "x')])),
    ("qwen3-coder", "<tool_call>\n<function=f>\noops</function>\n</tool_call> b", ("b", [("f", "{oops</function>")])),
    ("qwen3-coder", "a < b <functio", ("a < b <functio", [])),
    ("json", '```json\n[{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]\n```', (
        "", [("f", '{"a": 1}'), ("f", "{}")])),
    ("json", '{"name": "f", "arguments": {}}\n{"name": "f", "parameters": {"a": 2}}', (
        "", [("f", "{}"), ("f", '{"a": 2}')])),
    ("json", '{"name": "f", "arguments": {}}\n\nDone.', ("Done.", [("f", "{}")])),
    ("json", "```python\nprint()\n```", ("```python\nprint()\n```", [])),
    ("json", "[]", ("[]", [])),
    ("json", '[{"name": "f", "arguments": {}}, {bad}]', ("{bad}]", [("f", "{}")])),
    ("json", "", ("", [])),
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "text", "expected"), CASES, ids=range(len(CASES)))
def test_a_text_is_read_the_same_however_it_is_cut(name: str, text: str, expected: Read) -> None:
    form = FORMATS[name]
    assert seen(read_calls(text, form, OFFERED, schemas=SCHEMAS)) == expected
    cuts = [(0, *two, len(text)) for two in combinations(range(1, max(len(text), 1)), 2)]
    cuts = random.Random(len(text)).sample(cuts, min(300, len(cuts)))
    for cut in [*cuts, tuple(range(len(text) + 1))]:
        answer, parser = Answer(), CallParser(form, OFFERED, schemas=SCHEMAS)
        for first, last in pairwise(cut):
            answer.add(parser.push(text[first:last]))
        answer.add(parser.finish())
        assert seen(answer) == expected, cut


@pytest.mark.slow
def test_random_texts_are_read_the_same_however_they_are_cut() -> None:
    """Texts of the pieces that calls are made of, in any order: nothing raises, nothing but white space is lost."""
    draw = random.Random(5)
    pieces = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "```json"]
    pieces += ['{"name": "f", "arguments": {', '"a": 1', "}", "}}", "{", "[", "]", ",", ";", '"', "\\", " ", "\n", "f"]
    pieces += [
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "<|python_tag|>",
        "text",
        '"name"',
        ":",
        '"parameters"',
        "null",
        "f(a=1)",
        '<invoke name="f">',
        "<arg_key>",
        '{"name": "f", "arguments": {}}',
        "```",
    ]
    calls = 0
    whole_calls = ["<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"]
    whole_calls += ['{"name": "f", "arguments": {}}', '[{"name": "f", "arguments": {"a": [1, "]"]}}]']
    for _ in range(1000):
        form = draw.choice([form for form in FORMATS.values() if form.guides])  # harmony is all of an answer
        text = draw.choice(["", form.begin]) + draw.choice(["", *whole_calls])
        text += "".join(draw.choices([*pieces, form.begin, *whole_calls], k=draw.randrange(1, 12)))
        whole = read_calls(text, form, OFFERED)
        calls += bool(whole.calls)
        answer, parser, at = Answer(), CallParser(form, OFFERED), 0
        while at < len(text):
            step = draw.choice([1, 1, 2, 3, 5, 8])
            answer.add(parser.push(text[at : at + step]))
            at += step
        answer.add(parser.finish())
        assert seen(answer) == seen(whole), (form.name, text)
        if not whole.calls:
            lost = text[len(whole.content) :]
            assert whole.content + lost == text
            markers = [marker for marker in (form.begin, form.tags.function[0] if form.tags else "") if marker]
            assert not lost or any(marker in lost for marker in markers)  # a call that is not complete
    assert calls > 250


@pytest.mark.parametrize("name", NAMES)
def test_a_call_written_by_a_template_is_read_back(name: str) -> None:
    """The assistant's turn, as the template writes it, is what its model writes."""
    ours = template(name)
    form = ours.call_format
    assert form is not None
    assert form.name == name
    arguments = {"city": 'Rome "x"\n日本', "n": [1, {"a": None}]}
    calls = [call("get_weather", arguments, "abcdefgh1")]
    if name != "llama3":  # one call in a turn
        calls.append(call("get-time", {}, "abcdefgh2"))
    before = [{"role": "user", "content": "Q"}]
    prompt = ours.render(before, tools=TOOLS)
    said = ours.render([*before, assistant("", tool_calls=calls)], tools=TOOLS, add_generation_prompt=False)
    assert said.startswith(prompt.rstrip("\n"))
    written = said[len(prompt.rstrip("\n")) :]
    ends = ("<|im_end|>\n", "<|eot_id|>", "</s>", "<|end_of_text|>\n", "<|end|>", "<|im_end|>", "<|eot|>", "<seed:eos>")
    for end in (*ends, "[e~[\n", "<|END_OF_TURN_TOKEN|>"):
        written = written.removesuffix(end)
    answer = read_calls(written, form, OFFERED, schemas=SCHEMAS)
    assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == [
        (one["function"]["name"], one["function"]["arguments"]) for one in calls
    ]
    assert answer.content == ""


def test_content_streams_at_once_and_arguments_as_they_come() -> None:
    parser = CallParser(FORMATS["hermes"], OFFERED)
    assert parser.push("I look") == [ContentDelta("I look")]
    assert parser.push(" it up. <tool") == [ContentDelta(" it up.")]
    assert parser.push('_call>\n{"name": "f"') == []
    assert not parser.called
    (begin, *rest) = parser.push(', "arguments": {"a')
    assert isinstance(begin, CallBegin)
    assert (begin.index, begin.name, rest) == (0, "f", [ArgumentsDelta(0, '{"a')])
    assert parser.called
    assert parser.push('": "b') == [ArgumentsDelta(0, '": "b')]
    assert parser.push('"}}\n</tool_call>\n') == [ArgumentsDelta(0, '"}')]
    assert parser.finish() == []


def test_a_text_of_a_call_as_xml_streams_as_it_comes_and_other_values_at_their_end() -> None:
    parser = CallParser(FORMATS["qwen3-coder"], OFFERED, schemas=SCHEMAS)
    assert parser.push("<tool_call>\n<function=typed") == []
    (begin, *rest) = parser.push(">\n<parameter=te")
    assert isinstance(begin, CallBegin)
    assert (begin.name, rest) == ("typed", [ArgumentsDelta(0, "{")])
    assert parser.push('xt>\nHe said "') == [ArgumentsDelta(0, '"text": "He said \\"')]
    assert parser.push("no\n</param") == [ArgumentsDelta(0, "no")]
    assert parser.push("eter>\n<parameter=count>\n1") == [ArgumentsDelta(0, '", "count": ')]
    assert parser.push("2\n</parameter>") == [ArgumentsDelta(0, "12")]
    assert parser.push("\n</function>\n</tool_call>") == [ArgumentsDelta(0, "}")]
    assert parser.finish() == []


def test_one_call_is_kept_where_one_is_wanted() -> None:
    text = 'a<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call> b'
    answer, parser = Answer(), CallParser(FORMATS["hermes"], OFFERED, single=True)
    for character in text:
        answer.add(parser.push(character))
        assert seen(answer) == ("a", [("f", '{"a": 1}')]) or not parser.done
    assert parser.done
    answer.add(parser.finish())
    assert seen(answer) == ("a", [("f", '{"a": 1}')])
    odd = '{"name": "f", "parameters": {}, oops} a'
    assert seen(read_calls(odd, FORMATS["llama3"], OFFERED, single=True)) == ("", [("f", "{}")])


def test_ids_differ_and_have_the_form_that_templates_take() -> None:
    for form in FORMATS.values():
        ids = {form.new_id("f", index) for index in range(100)}
        assert len(ids) == 100
        for one in ids:
            if form.numbered_ids:
                assert one.startswith("functions.f:")
                continue
            assert (len(one) == 9 and one.isalnum()) if form.short_ids else one.startswith("call_")


def test_the_format_of_a_template() -> None:
    assert format_of("{{ messages }}") is FORMATS["json"]
    assert format_of("<tool_call><function=x><parameter=y>") is FORMATS["qwen3-coder"]
    for unread, words in {
        "<tool_call><function=x>": "<function=name>",
    }.items():
        assert format_of(unread) is None
        assert words in (unread_format(unread) or "")
    assert isinstance(format_of("[TOOL_CALLS]"), CallFormat)
    assert format_of("<|start|>assistant<|channel|>") is FORMATS["harmony"]
    assert format_of("<tool_call>{{ name }}<arg_key>") is FORMATS["glm"]
