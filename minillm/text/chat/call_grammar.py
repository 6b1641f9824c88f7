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
from .calls import CallFormat, CallTags
from .parameter_types import properties_of, resolved, types_of

_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space as templates write calls, by Python's `json.dumps`"""
NEWLINE = "\n"
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
        if form.tags is not None:
            bodies.append(_function(form.tags, i, function, bool(constrained), rules))
            continue
        if form.literals:
            bodies.append(_python_call(i, function, bool(constrained), rules))
            continue
        schema = function.get("parameters", _NO_PARAMETERS) if constrained else {}
        rules.append(f"args_{i}: {_held(schema | {'type': 'object'}, function)}")
        bodies.append(_body(form, function["name"], f"args_{i}"))
    rules.append(f"body: {' | '.join(bodies)}")
    rules += _parts(form, added_ids)
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


def _parts(form: CallFormat, added_ids: Mapping[str, int]) -> list[str]:
    """Rules that calls in a format refer to."""
    rules = []
    if form.tags is not None:
        tags = form.tags
        opening = f"{json.dumps(tags.key[0])} key {json.dumps(_before_value(tags))}"
        rules += [
            rf"value[lazy]: /(.|\n)*/ {json.dumps(tags.value[1].lstrip(NEWLINE))}",
            r'key: /[^<>"\n]+/',
            rf'any: {opening} value "\n"',
        ]
    if form.literals:
        rules += ['keyword: /[A-Za-z_][A-Za-z0-9_]*/ "=" literal', "literal: %json {}"]
    if form.args_marker:
        rules.append(f"args_marker: {_spelled(form.args_marker, added_ids)}")
    if form.around[0]:
        rules += [
            f"{name}: {_spelled(text, added_ids)}" for name, text in zip(("before", "behind"), form.around, strict=True)
        ]
    return rules


def _or(token_ids: Sequence[int]) -> str:
    """These tokens as a further alternative."""
    return f" | <[{','.join(map(str, token_ids))}]>" if token_ids else ""


def _body(form: CallFormat, name: str, arguments: str) -> str:
    """A call without the markers around all calls."""
    if form.args_marker:
        named = f"functions.{name}:" if form.numbered_ids else name
        number = " /[0-9]{1,3}/" if form.numbered_ids else ""
        call = f"{json.dumps(named)}{number} args_marker {arguments}"
        return f"before {call} behind" if form.around[0] else call
    text = f'"{form.name_key}": {json.dumps(name)}, {json.dumps(form.arguments)}: '
    if form.name_key == "name":
        return f'{json.dumps("{" + text)} {arguments} "}}"'
    begin = json.dumps('{"tool_call_id": "')
    return f'{begin} /[0-9]{{1,3}}/ {json.dumps(chr(34) + ", " + text)} {arguments} "}}"'


def _function(tags: CallTags, i: int, function: Mapping[str, Any], constrained: bool, rules: list[str]) -> str:
    """A call of tool number `i` as XML; rules for its values are added to `rules`."""
    begin, end = json.dumps(f"{tags.function[0]}{function['name']}{tags.function[1]}"), json.dumps(tags.end)
    end = end if tags.end else ""
    parameters = _parameters(function, constrained, '<>"\n')
    if parameters is None:
        return f"{begin} any* {end}"
    written, root = [], function.get("parameters", _NO_PARAMETERS)
    for j, (key, schema, needed) in enumerate(parameters):
        value = _value(tags, f"value_{i}_{j}", resolved(schema, root), function, rules)
        if value is None and function.get("strict") and (more := _unheld(schema, root)):
            name = function["name"]
            raise ParameterError(f"tools: {name} is strict: this model's calls cannot hold {more} of {shown(key)}")
        parameter = f'{json.dumps(tags.key[0] + key + _before_value(tags))} {value or "value"} "\\n"'
        written.append(parameter if needed else f"({parameter})?")
    return " ".join([begin, *written, end])


def _python_call(i: int, function: Mapping[str, Any], constrained: bool, rules: list[str]) -> str:
    """A call of tool number `i` as Python writes it, with JSON for literals; rules are added to `rules`."""
    begin = json.dumps(f"{function['name']}(")
    parameters = _parameters(function, constrained, None)
    if parameters is None:
        return f'{begin} (keyword (", " keyword)*)? ")"'
    root = function.get("parameters", _NO_PARAMETERS)
    defined = {name: root[name] for name in ("$defs", "definitions") if name in root}
    written: list[str] = []
    for j, (key, schema, needed) in enumerate(sorted(parameters, key=lambda parameter: not parameter[2])):
        rules.append(f"value_{i}_{j}: {_held(defined | dict(resolved(schema, root)), function)}")
        keyword = f"{json.dumps(f'{key}=')} value_{i}_{j}"
        comma = '", " ' if any(parameter[2] for parameter in parameters) and j else ""
        written.append(f"{comma}{keyword}" if needed else f"({comma}{keyword})?")
    if written and not any(parameter[2] for parameter in parameters):  # any may be the first
        keywords = " | ".join(f"{json.dumps(f'{key}=')} value_{i}_{j}" for j, (key, _, _) in enumerate(parameters))
        rules.append(f"keywords_{i}: {keywords}")
        return f'{begin} (keywords_{i} (", " keywords_{i})*)? ")"'
    return " ".join([begin, *written, '")"'])


def _parameters(
    function: Mapping[str, Any], constrained: bool, forbidden: str | None
) -> list[tuple[str, Any, bool]] | None:
    """Name and schema of each parameter, and whether it has to be there; None if any may be written.

    Args:
        function: a tool's
        constrained: whether its schema counts
        forbidden: characters that a name cannot have; None: it has to be a name of Python

    Raises:
        ParameterError: it is strict, and cannot be held to its schema.
    """
    name, schema, strict = function["name"], function.get("parameters", _NO_PARAMETERS), function.get("strict")
    properties, required = properties_of(schema), schema.get("required")
    if not properties and schema.get("additionalProperties") is not False:
        if strict:
            raise ParameterError(f"tools: {name} is strict: its schema should name its parameters as `properties`")
        return None
    unwritable = [
        key
        for key in properties
        if not (key.isidentifier() if forbidden is None else key and not set(key) & set(forbidden))
    ]
    if strict and unwritable:
        raise ParameterError(f"tools: {name}: this model's calls cannot have a parameter named {shown(unwritable[0])}")
    if not constrained or unwritable:
        return None
    return [(key, value, isinstance(required, list) and key in required) for key, value in properties.items()]


def _before_value(tags: CallTags) -> str:
    """The text between a key and its value, but for a line break, which belongs to the value."""
    return f"{tags.key[1]}{tags.value[0].rstrip(NEWLINE)}"


def _value(
    tags: CallTags, rule: str, schema: Mapping[str, Any], function: Mapping[str, Any], rules: list[str]
) -> str | None:
    """A value and the tag after it; None if it is any text."""
    root = function["parameters"]
    before = NEWLINE if tags.value[0].endswith(NEWLINE) else ""
    types = types_of(schema, root)
    if types and "string" not in types:
        defined = {name: root[name] for name in ("$defs", "definitions") if name in root}
        rules.append(f"{rule}: {_held(defined | dict(schema), function)}")
        return (
            f"{json.dumps(before)} {rule} {json.dumps(tags.value[1])}"
            if before
            else f"{rule} {json.dumps(tags.value[1])}"
        )
    values = schema.get("enum", [schema.get("const")])
    if not (isinstance(values, list) and values and all(isinstance(value, str) for value in values)):
        return None
    return f"({' | '.join(json.dumps(f'{before}{value}{tags.value[1]}') for value in values)})"


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
    if form.around[0]:
        return begin, "body", "body"
    if form.args_marker or not form.begin:
        separator = json.dumps(form.separator) if form.separator else ""
        return begin, "body", f"{separator} {begin} body"
    line = "" if _ends_itself(form) else '"\\n" '
    end = "" if form.block else f"{line}{_spelled(form.end, added_ids)} {json.dumps(form.separator)} {begin} "
    return begin, f"{line}body", f"{end}{line}body"


def _ends_itself(form: CallFormat) -> bool:
    """True if no line break stands between the markers and a call."""
    return bool(form.around[0]) or (form.tags is not None and not form.tags.end)


def _closing(form: CallFormat, added_ids: Mapping[str, int]) -> str:
    end = f" {_spelled(form.end, added_ids)}" if form.begin and form.end else ""
    if form.lists or _ends_itself(form):
        return f' "]"{end}' if form.lists else end
    return f' "\\n"{end}' if end else ""


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
