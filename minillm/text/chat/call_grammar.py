"""Grammars under which a model writes tool calls that parse, with arguments that fit the tools' schemas.

A grammar is text for the field `guided_grammar`: Lark's notation as llguidance reads it, with JSON schemas in place
(`%json`) and tokens by id (`<[7]>`), for markers that are tokens of their own: to llguidance these are no text, even
where they are not special.

A `strict` tool's schema is held to the letter, or refused by name. Of the schema of another tool the grammar leaves out
what it cannot hold, with a line in the log.

In calls as XML a value that is a text stands as it is, so the grammar holds its `enum` and nothing else; a `strict`
tool whose schema says more of it is refused.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ParameterError, shown
from ..schemas import LIMIT_LINE, digits_in, exact, loosened
from .calls import CallFormat
from .parameter_types import properties_of, resolved, types_of

_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space as templates write calls, by Python's `json.dumps`"""
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(
    form: CallFormat,
    tools: Sequence[Mapping[str, Any]],
    added_ids: Mapping[str, int],
    *,
    required: bool = True,
    single: bool = True,
    content: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of an answer with calls.

    Args:
        form: how calls are written
        tools: `{"type": "function", "function": {...}}` each, checked; those that may be called
        added_ids: ids of the tokenizer's added tokens, by their text
        required: the answer is calls alone; else it may be content, and calls in it have the right form: a tool's name,
            and an object, which fits the schema if the tool is `strict`
        single: one call at most
        content: a JSON schema of content, if not any text

    Raises:
        ParameterError: the format, or llguidance, cannot hold what a strict tool's or the content's schema says; or no
            grammar holds calls in this format.
    """
    if not form.guides:
        raise ParameterError(f"calls in the format {form.name} are held by no grammar: leave it out")
    digits = digits_in(json.dumps([content, *(tool["function"].get("parameters") for tool in tools)]))
    return LIMIT_LINE.format(digits) + _rules(form, tools, added_ids, required=required, single=single, content=content)


def _rules(
    form: CallFormat,
    tools: Sequence[Mapping[str, Any]],
    added_ids: Mapping[str, int],
    *,
    required: bool,
    single: bool,
    content: Mapping[str, Any] | None,
) -> str:
    """`call_grammar` without its first line."""
    rules: list[str] = []
    bodies = []
    for i, tool in enumerate(tools):
        function = tool["function"]
        constrained = required or function.get("strict")
        if form.unmarked:
            bodies.append(_function(i, function, bool(constrained), rules))
            continue
        schema = function.get("parameters", _NO_PARAMETERS) if constrained else {}
        rules.append(f"args_{i}: {_held(schema | {'type': 'object'}, function)}")
        bodies.append(_body(form, function["name"], f"args_{i}"))
    rules.append(f"body: {' | '.join(bodies)}")
    if form.unmarked:
        rules += [
            r'value[lazy]: /(.|\n)*/ "</parameter>"',
            r"key: /[^<>\n]+/",
            r'any: "<parameter=" key ">" value "\n"',
        ]
    if form.args_marker:
        rules.append(f"args_marker: {_spelled(form.args_marker, added_ids)}")
    begin, call, further = _pieces(form, added_ids)
    more = "" if single else f" ({further})*"
    rules.append(f"after: {call}{more}{_closing(form, added_ids)}")
    others = sorted({*added_ids.values()} - {added_ids.get(form.begin)})  # <think> and the like
    text = rf"text: (/(.|\n)+/{_or(others)})*"
    if required:
        return "\n".join([f"start: {begin} after", *rules]) + "\n"
    if content is not None:
        answer = f"start: {begin} after | content"
        rules.append(f"content: {_json(exact(content, 'response_format'))}")
    elif not form.begin:  # an answer that begins as a call does is one
        answer = "start: (after | plain)?"
        rules += [rf"plain: (/[^\[{{ \t\r\n`](.|\n)*/{_or(others)}) text", text]
    elif form.begin in added_ids:
        answer = f"start: text ({begin} after text)*"
        rules.append(text)
    else:
        answer = "start: (begin after)* text"
        rules += [rf"begin[lazy]: /(.|\n)*/ {json.dumps(form.begin)}", text]
    return "\n".join([answer, *rules]) + "\n"


def _or(token_ids: Sequence[int]) -> str:
    """These tokens as a further alternative."""
    return f" | <[{','.join(map(str, token_ids))}]>" if token_ids else ""


def _body(form: CallFormat, name: str, arguments: str) -> str:
    """A call without its markers."""
    if form.args_marker:
        return f"{json.dumps(name)} args_marker {arguments}"
    text = f'{{"name": {json.dumps(name)}, {json.dumps(form.arguments)}: '
    return f'{json.dumps(text)} {arguments} "}}"'


def _function(i: int, function: Mapping[str, Any], constrained: bool, rules: list[str]) -> str:
    """A call of tool number `i` as XML; rules for its values are added to `rules`."""
    name, schema, strict = function["name"], function.get("parameters", _NO_PARAMETERS), function.get("strict")
    properties, required = properties_of(schema), schema.get("required")
    begin, end = json.dumps(f"<function={name}>\n"), '"</function>"'
    if not properties and schema.get("additionalProperties") is not False:
        if strict:
            raise ParameterError(f"tools: {name} is strict: its schema should name its parameters as `properties`")
        return f"{begin} any* {end}"
    unwritable = next((key for key in properties if not key or set(key) & set("<>\n")), None)
    if strict and unwritable is not None:
        raise ParameterError(f"tools: {name}: this model's calls cannot have a parameter named {shown(unwritable)}")
    if not constrained or unwritable is not None:
        return f"{begin} any* {end}"
    parameters = []
    for j, (key, parameter_schema) in enumerate(properties.items()):
        value = _value(f"value_{i}_{j}", resolved(parameter_schema, schema), function, rules)
        if value is None and strict and (more := _unheld(parameter_schema, schema)):
            raise ParameterError(f"tools: {name} is strict: this model's calls cannot hold {more} of {shown(key)}")
        parameter = f'{json.dumps(f"<parameter={key}>")} {value or "value"} "\\n"'
        parameters.append(parameter if isinstance(required, list) and key in required else f"({parameter})?")
    return " ".join([begin, *parameters, end])


def _value(rule: str, schema: Mapping[str, Any], function: Mapping[str, Any], rules: list[str]) -> str | None:
    """A value and the tag after it; None if it is any text."""
    root = function["parameters"]
    types = types_of(schema, root)
    if types and "string" not in types:
        defined = {name: root[name] for name in ("$defs", "definitions") if name in root}
        rules.append(f"{rule}: {_held(defined | dict(schema), function)}")
        return f'"\\n" {rule} "\\n</parameter>"'
    values = schema.get("enum", [schema.get("const")])
    if not (isinstance(values, list) and values and all(isinstance(value, str) for value in values)):
        return None
    return f"({' | '.join(json.dumps(f'{chr(10)}{value}{chr(10)}</parameter>') for value in values)})"


def _unheld(schema: Any, root: Mapping[str, Any]) -> str | None:
    """The demands of a schema beyond the type of a text."""
    known = {"type", "title", "description", "default", "examples"}
    more = sorted({*resolved(schema, root)} - known)
    return more[0] if more else None


def _pieces(form: CallFormat, added_ids: Mapping[str, int]) -> tuple[str, str, str]:
    """The marker before calls, the first call after it, and a further call."""
    begin = _spelled(form.begin, added_ids) if form.begin else ""
    if form.lists:
        return begin, '" "? "[" body', '", " body'
    if form.args_marker or not form.begin:
        separator = json.dumps(form.separator) if form.separator else ""
        return begin, "body", f"{separator} {begin} body"
    return (
        begin,
        '"\\n" body',
        f'"\\n" {_spelled(form.end, added_ids)} {json.dumps(form.separator)} {begin} "\\n" body',
    )


def _closing(form: CallFormat, added_ids: Mapping[str, int]) -> str:
    end = f" {_spelled(form.end, added_ids)}" if form.begin and form.end else ""
    return f' "]"{end}' if form.lists else f' "\\n"{end}' if end else ""


def _held(schema: Mapping[str, Any], function: Mapping[str, Any]) -> str:
    """JSON of a tool's schema, or of a value's in it, as an expression of the grammar."""
    if function.get("strict"):
        return _json(exact(schema, f"tools: {function['name']}"))
    return _json(loosened({"x-guidance": _SPACED | {"lenient": True}} | dict(schema)))


def _json(schema: Mapping[str, Any]) -> str:
    """JSON of a schema, as an expression of the grammar."""
    return f"%json {json.dumps({'x-guidance': _SPACED} | dict(schema))}"


def _spelled(marker: str, added_ids: Mapping[str, int]) -> str:
    token_id = added_ids.get(marker)
    return json.dumps(marker) if token_id is None else f"<[{token_id}]>"
