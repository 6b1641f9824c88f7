"""The JSON types that a schema admits, and JSON for a value that a model has written as plain text.

Calls as XML (`<parameter=days>3</parameter>`) do not say whether 3 is a number or a text: the tool's schema does.
"""

import ast
import json
import math
from collections.abc import Mapping
from typing import Any

_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Templates write values by Jinja, and models as their templates do"""
_JSON = {"true": True, "false": False, "null": None}
_DEEPEST = 16
"""References and alternatives that are followed"""

Schema = Mapping[str, Any]


def properties_of(schema: Schema) -> Mapping[str, Any]:
    """The schemas of an object's keys; none if the schema does not name them at its top."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def types_of(schema: Any, root: Schema, depth: int = 0) -> frozenset[str]:
    """The types of JSON that a schema admits: "string", "number", ...; empty if it does not say.

    Args:
        schema: a value's schema
        root: the schema in which its references are looked up
        depth: alternatives followed so far
    """
    schema = resolved(schema, root)
    if depth > _DEEPEST:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_type_of(value) for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            alternatives = [types_of(alternative, root, depth + 1) for alternative in schema[key]]
            return frozenset().union(*alternatives) if all(alternatives) else frozenset()
    members = schema.get("allOf")
    parts = [types_of(member, root, depth + 1) for member in members] if isinstance(members, list) else []
    said = [types for types in parts if types]
    return said[0].intersection(*said[1:]) if said else frozenset()


def is_text(types: frozenset[str]) -> bool:
    """True if a value is the text as it stands: the schema admits nothing else, or does not say what it admits."""
    return types <= {"string"}


def json_of(text: str, types: frozenset[str]) -> str:
    """A value as JSON: of one of the types if the text reads as such, else the text."""
    literal = text.strip()
    literal = _PYTHON.get(literal, literal)
    try:
        value = json.loads(literal, parse_constant=_refused)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _type_of(value)
    if kind == "number" and "number" not in types and "integer" in types and math.isfinite(value) and value % 1 == 0:
        return str(int(value))  # 3.0
    if kind in types or (kind == "integer" and "number" in types):
        return literal
    return json.dumps(text, ensure_ascii=False)


def keywords_of(text: str) -> dict[str, Any] | None:
    """The arguments of a call as Python writes it: `key=literal, ...`; None if the text is none.

    Keys may be words that Python keeps for itself, such as `from`. JSON's `true`, `false` and `null` are read too.
    """
    arguments, rest = {}, text.strip()
    try:
        while rest:
            key, _, rest = rest.partition("=")
            if not key.strip().isidentifier():
                return None
            end = _end_of_literal(rest)
            arguments[key.strip()] = _literal(ast.parse(rest[:end].strip(), mode="eval").body)
            rest = rest[end + 1 :].strip()
        json.dumps(arguments, allow_nan=False)  # a set, a complex number or an infinity is no JSON
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return arguments


def _end_of_literal(text: str) -> int:
    """The place of the comma after the literal with which a text begins, or its length."""
    depth, quote, at = 0, "", 0
    while at < len(text):
        c = text[at]
        if quote:
            at += c == "\\"
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c == "," and not depth:
            break
        depth += 0 if quote else (c in "([{") - (c in ")]}")
        at += 1
    return min(at, len(text))


def _literal(node: ast.expr) -> Any:
    """The value of a literal, such as JSON can have."""

    class FromJson(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.Constant(_JSON[node.id]) if node.id in _JSON else node

        def visit_Constant(self, node: ast.Constant) -> ast.expr:
            if isinstance(node.value, str):  # JSON may escape a character as two halves
                return ast.Constant(node.value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
            return node

    return ast.literal_eval(FromJson().visit(node))


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def resolved(schema: Any, root: Schema) -> Schema:
    """A schema, or that to which it refers as `#/$defs/...`; an empty one if there is none."""
    for _ in range(_DEEPEST):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = root if reference.startswith("#") else None
        for key in reference.split("/")[1:]:
            schema = schema.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
