"""A tool that is not strict takes any schema: the grammar leaves out what it cannot hold, and never admits less."""

import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from minillm import Engine
from minillm.server import make_app
from minillm.text import schemas
from minillm.text.chat import FORMATS, call_grammar, read_calls

from ..server.client import calling_engine, error_of, post
from .test_calls_cut_short import CHAT
from .test_numbers_of_guides import follows

pytest.importorskip("llguidance", reason="needs the extra `guided`")

# Of a parameter's schema: keywords named in the log, values that fit it, values that the rest of it still forbids.
ODD: dict[str, tuple[dict[str, Any], list[str], list[Any], list[Any]]] = {
    "format path": ({"type": "string", "format": "path"}, ["format path"], ["/tmp", ""], [5]),
    "uniqueItems": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        ["uniqueItems"],
        [[1, 2]],
        ["a"],
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, ["propertyNames"], [{"ab": 1}], [5]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"], [1, 1.5], ["a"]),
    "look-ahead": ({"type": "string", "pattern": "^(?!x).*$", "maxLength": 3}, ["pattern"], ["ab"], ["abcd"]),
    "not": ({"type": "string", "not": {"const": "x"}}, ["not"], ["y"], [5]),
    "if": (
        {"type": "string", "if": {"maxLength": 1}, "then": {"const": "a"}, "else": {"minLength": 3}},
        ["if", "then", "else"],
        ["a", "abc"],
        [5],
    ),
    "contains": ({"type": "array", "contains": {"const": 1}, "minContains": 2}, ["contains"], [[1, 1]], ["a"]),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        ["dependentRequired"],
        [{"a": 1, "b": 2}, {}],
        [5],
    ),
    "dependentSchemas": (
        {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
        ["dependentSchemas"],
        [{}],
        [5],
    ),
    "unevaluatedProperties": (
        {"allOf": [{"properties": {"a": {"type": "integer"}}}], "type": "object", "unevaluatedProperties": False},
        ["unevaluatedProperties"],
        [{"a": 1}],
        [5],
    ),
    "patterns that overlap": (
        {"type": "object", "patternProperties": {"^a": {}, "b$": {"type": "integer"}}, "additionalProperties": False},
        ["patternProperties"],
        [{"a": 1, "b": 2}],
        [5],
    ),
    "a pattern of keys": (
        {"type": "object", "patternProperties": {"^(?=a)": {}}, "additionalProperties": False},
        ["patternProperties"],
        [{"a": 1}],
        [5],
    ),
    "big const": ({"type": "integer", "const": 2**53 + 1}, ["const"], [2**53 + 1], ["a"]),
    "big enum": ({"enum": [1, 2**53 + 1]}, ["enum"], [1, 2**53 + 1], []),
    "int64": ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, ["maximum"], [5, 2**63 - 1], [-1, "a"]),
    "multipleOf": ({"type": "integer", "multipleOf": 1_000_003}, ["multipleOf"], [1_000_003], ["a"]),
    "exclusive": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["exclusiveMinimum"], [0.5], [0.75]),
    "a type of no JSON": ({"type": "file"}, ["type"], ["a", 5], []),
    "no schema": (5, [], ["a", 5], []),  # type: ignore[dict-item]
    "required as in draft 3": ({"type": "object", "required": True}, ["required"], [{"a": 1}], [5]),
    "malformed anyOf": ({"type": "string", "anyOf": 3}, ["anyOf"], ["a"], [5]),
    "empty anyOf": ({"type": "string", "anyOf": []}, ["anyOf"], ["a"], [5]),
    "malformed properties": (
        {"type": "object", "properties": ["a"], "additionalProperties": False},
        ["properties"],
        [{"a": 1}],
        [5],
    ),
    "elsewhere": ({"$ref": "https://example.com/x.json"}, ["$ref"], ["a", 5], []),
    "nowhere": ({"$ref": "#/$defs/none"}, ["$ref"], ["a", 5], []),
    "contradiction": ({"type": "integer", "minimum": 3, "maximum": 1}, [], [], ["a"]),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with calling_engine(tmp_path_factory.mktemp("schemas"), 2048) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _unsaid() -> None:
    schemas._say.cache_clear()


def tool_of(parameter: Any, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": parameter}, "required": ["a"], "additionalProperties": False}
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def left_out_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The parts of a schema that log lines say are left out."""
    lines = [record.getMessage() for record in caplog.records if "not strict" in record.getMessage()]
    return [line.partition("leaves out ")[2].removesuffix(" of the schema") for line in lines]


@pytest.mark.longer
@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ODD)
def test_a_required_call_admits_what_fits_and_the_log_names_what_is_left_out(
    name: str, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    schema, words, fitting, wrong = ODD[name]
    tool = tool_of(schema)
    with caplog.at_level(logging.WARNING, "minillm"):
        for _ in range(2):
            grammar = call_grammar(FORMATS["json"], [tool], engine.tokenizer.added_ids)  # type: ignore[union-attr]
    said = left_out_in(caplog)
    assert len(said) == len(set(said)), "said twice"
    assert {*words} <= {*said}
    for value in fitting:
        assert follows(engine, call_of(value), guided_grammar=grammar), value
    for value in wrong:
        assert not follows(engine, call_of(value), guided_grammar=grammar), value
    assert not follows(engine, call_of("x").replace('"a"', '"b"'), guided_grammar=grammar)


def call_of(value: Any) -> str:
    return json.dumps({"name": "f", "arguments": {"a": value}})


@pytest.mark.slow
def test_one_odd_parameter_leaves_the_others_as_they_are(engine: Engine) -> None:
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "^(?=x)"},
            "b": {"$ref": "#/$defs/unit"},
            "c": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]$"}, "maxItems": 2},
        },
        "required": ["a", "b", "c"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["m", "km"]}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar = call_grammar(FORMATS["json"], [tool], engine.tokenizer.added_ids)  # type: ignore[union-attr]
    right = {"a": "anything", "b": "km", "c": ["x"]}
    for change, admitted in (({}, True), ({"b": "mile"}, False), ({"c": ["xy"]}, False), ({"a": 5}, False)):
        text = json.dumps({"name": "f", "arguments": right | change})
        assert follows(engine, text, guided_grammar=grammar) == admitted, text


@pytest.mark.longer
def test_a_schema_that_refers_to_itself_is_followed(engine: Engine) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "additionalProperties": False}
    parameters = {"$ref": "#/$defs/n", "$defs": {"n": node}, "uniqueItems": True}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar = call_grammar(FORMATS["json"], [tool], engine.tokenizer.added_ids)  # type: ignore[union-attr]
    text = '{"name": "f", "arguments": {"next": {"next": {}}}}'
    assert follows(engine, text, guided_grammar=grammar)
    assert not follows(engine, text.replace("{}", "5"), guided_grammar=grammar)


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "parameters", [{}, {"anyOf": 3}, {"type": None}, {"type": ["object", "null"]}, {"minProperties": -1}]
)
def test_a_schema_of_which_nothing_can_be_held_admits_any_object(parameters: dict[str, Any], engine: Engine) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "Go."}], "tools": [tool], "tool_choice": "required"}
    body |= {"parallel_tool_calls": False, "max_tokens": 3}
    assert post(make_app(engine), CHAT, body).status_code == 200
    grammar = call_grammar(FORMATS["json"], [tool], engine.tokenizer.added_ids)  # type: ignore[union-attr]
    for arguments, admitted in ({"x": [1]}, True), ({}, True), (None, False), ([], False):
        text = json.dumps({"name": "f", "arguments": arguments})
        assert follows(engine, text, guided_grammar=grammar) == admitted, text


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in ODD if name not in ("int64", "exclusive", "no schema", "oneOf")])
def test_a_strict_tool_and_a_form_refuse_by_name_what_they_cannot_hold(name: str, engine: Engine) -> None:
    app, talk = make_app(engine), [{"role": "user", "content": "Go."}]
    schema = tool_of(ODD[name][0], strict=True)["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    for body, param in (
        ({"tools": [tool_of(ODD[name][0], strict=True)], "tool_choice": "required"}, "tools"),
        ({"tools": [tool_of(ODD[name][0], strict=True)]}, "tools"),
        ({"response_format": form}, "response_format"),
    ):
        error = error_of(post(app, CHAT, {"messages": talk, "max_tokens": 3, **body}))
        assert error["param"] == param, error


@pytest.mark.slow
@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if form.guides])
def test_calls_of_tools_as_agents_send_them_parse_in_every_format(form: str, engine: Engine) -> None:
    properties = {str(i): copy.deepcopy(schema) for i, (schema, *_) in enumerate(ODD.values())}
    properties |= {"a<b": {"type": "string"}} if form != "qwen3-coder" else {}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        body = {"messages": [{"role": "user", "content": "Go."}], "tools": [tool], "tool_choice": choice}
        body |= {"parallel_tool_calls": False, "max_tokens": 40, "temperature": 2.0, "seed": 3}
        response = post(make_app(engine, tool_parser=form), CHAT, body)
        assert response.status_code == 200, response.text
        assert not response.json()["choices"][0]["message"]["content"]


@pytest.mark.longer
def test_a_parameter_that_xml_cannot_name_leaves_the_parameters_free(engine: Engine) -> None:
    tool = tool_of({"type": "string"})
    tool["function"]["parameters"]["properties"]["x>y"] = {"type": "integer"}
    grammar = call_grammar(FORMATS["qwen3-coder"], [tool], engine.tokenizer.added_ids)  # type: ignore[union-attr]
    text = "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    assert follows(engine, text, guided_grammar=grammar)
    assert [call.name for call in read_calls(text, FORMATS["qwen3-coder"], ["f"]).calls] == ["f"]
