"""JSON schemas as llguidance can hold them: numbers it would read inexactly, keywords it does not know.

llguidance reads the numbers of a schema as float64 and writes bounds as digits of the decimal that identifies them. So
`const: 9007199254740993` admits another number, and `exclusiveMinimum: 0` beside `maximum: 0.5` admits 0. `exact`
rewrites bounds so that nothing beyond them is admitted, and refuses what cannot be rewritten. `loosened` leaves out all
that llguidance cannot hold: what remains admits every value that the schema admits.

Source of the keywords: json-schema.org, draft 2020-12, and the older spellings of drafts 4 to 7.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, Context, Decimal
from functools import lru_cache, partial
from typing import Any

from ..errors import ParameterError, shown

logger = logging.getLogger("minillm")

LIMIT_LINE = "// numbers of at most {} digits\n"
"""The first line of a grammar with JSON's numbers, limited: see `decoding.number_limit`"""
USUAL_DIGITS = 16
"""Most digits of a number's integral and decimal part, as in llama.cpp's grammars of JSON schemas"""

_MOST = 2**63 - 1024
"""The largest bound of an integer: llguidance holds bounds in 64 bits, and this is a float64"""
_MOST_DECIMAL = Decimal("922337203685477E4")
"""The same of other numbers: 15 digits identify a float64"""
_EXACT = 2**53
_LONG = 10**15
_LARGEST_STEP = 10_000
"""Largest `multipleOf`, in units of its last digit: llguidance follows each remainder, above this for minutes"""
_TRIALS = 200
"""Most compilations by which `loosened` looks for the keywords to leave out"""

_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_ONE = frozenset(
    (
        *("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else"),
        *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    )
)
"""Keywords whose value is a schema; for `items` it may be a list of schemas"""
_MANY = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_REST = {
    "properties": ("additionalProperties", "unevaluatedProperties"),
    "patternProperties": ("additionalProperties", "unevaluatedProperties"),
    "prefixItems": ("items", "unevaluatedItems"),
    "items": ("additionalItems", "unevaluatedItems"),
}
"""Keywords -> those that are about what they do not name: without the former they would admit less"""
_KEPT_LONGEST = ("type", "properties", "required", "items")
"""Keywords without which a schema says little"""
_CONTEXT = Context(prec=400)

Edit = Callable[[dict[str, Any]], dict[str, Any]]


class _InexactError(ValueError):
    """A keyword with a number that llguidance cannot hold."""

    def __init__(self, keyword: str, value: Any, reason: str) -> None:
        super().__init__(f"{keyword} {shown(value)} {reason}")
        self.keyword = keyword


def digits_in(text: str) -> int:
    """The most digits that numbers under a schema need: as many as the longest number in its text, at least 16."""
    return max(USUAL_DIGITS, max(map(len, re.findall("[0-9]+", text)), default=0))


def exact(schema: Any, name: str) -> Any:
    """The schema, with bounds under which llguidance admits only what the schema admits.

    Bounds are moved inwards where they must: to the next float64, or to 16 or 15 digits.

    Args:
        schema: any JSON
        name: the schema's name, for errors

    Raises:
        ParameterError: a number cannot be held: the message names its keyword.
    """
    try:
        return _mapped(schema, _exact_numbers)
    except _InexactError as error:
        raise ParameterError(f"{name}: {error}") from None
    except RecursionError:
        raise ParameterError(f"{name} is nested too deeply") from None


def loosened(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without what llguidance cannot hold; any JSON object if that is all of it.

    The keywords left out are named in the log, each once.

    Args:
        schema: an object's or a value's; "x-guidance" says `lenient`
    """
    text, left_out = _loosened(json.dumps(schema))
    for name in left_out:
        _say(name)
    return json.loads(text)  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _say(name: str) -> None:
    logger.warning("a tool that is not strict: the grammar of its calls leaves out %s of the schema", name)


# --- a schema's parts -------------------------------------------------------------------------------------------------


def _mapped(schema: Any, edit: Edit) -> Any:
    """A copy in which each schema is edited, outer ones before those in them."""
    if not isinstance(schema, Mapping):
        return schema
    return {key: _below(key, value, lambda child: _mapped(child, edit)) for key, value in edit(dict(schema)).items()}


def _below(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value of a keyword, with the schemas in it changed."""
    if key in _NAMED and isinstance(value, Mapping):
        return {name: change(child) for name, child in value.items()}
    if (key in _MANY or key == "items") and isinstance(value, list):
        return [change(child) for child in value]
    return change(value) if key in _ONE else value


def _without(node: dict[str, Any], keyword: str) -> dict[str, Any]:
    """The schema without a keyword and those that would admit less without it."""
    out = {keyword, *_REST.get(keyword, ())}
    return {key: value for key, value in node.items() if key not in out}


# --- numbers ----------------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _exact_numbers(node: dict[str, Any]) -> dict[str, Any]:
    for keyword in ("const", "enum", "multipleOf"):
        if keyword in node:
            _check(keyword, node[keyword])
    return _with_exact_bounds(node)


def _check(keyword: str, value: Any) -> None:
    """Raise for numbers that llguidance cannot hold."""
    if keyword != "multipleOf":
        _check_values(keyword, value)
    elif _is_number(value) and not _is_short_step(value):
        raise _InexactError(keyword, value, f"is more than llguidance can follow, {_LARGEST_STEP} units")


def _check_values(keyword: str, value: Any) -> None:
    if isinstance(value, Mapping | list):
        for member in value.values() if isinstance(value, Mapping) else value:
            _check_values(keyword, member)
    elif _is_number(value) and not _is_held(value):
        reason = "is a number that llguidance cannot hold exactly: declare it as a string, or leave it out"
        raise _InexactError(keyword, value, reason)


def _is_held(value: float) -> bool:
    """Whether llguidance reads a number as it is and writes it so."""
    if isinstance(value, int):
        return abs(value) < 2**63 and int(float(value)) == value
    if not math.isfinite(value):
        return False
    decimal = Decimal(repr(value)).normalize()
    _, digits, exponent = decimal.as_tuple()
    if value.is_integer() and abs(value) >= _EXACT and int(decimal) != int(value):
        return False  # written with zeros after the digits that identify it
    # The range in which a product of two float64 is the number that was meant.
    return int("".join(map(str, digits))) <= _EXACT and isinstance(exponent, int) and abs(exponent) <= 22


def _is_short_step(step: float) -> bool:
    if isinstance(step, int):
        return abs(step) <= _LARGEST_STEP
    if not math.isfinite(step):
        return False
    exponent = Decimal(repr(step)).normalize().as_tuple().exponent
    return abs(Decimal(repr(step)).scaleb(max(-int(exponent), 0), _CONTEXT)) <= _LARGEST_STEP


def _with_exact_bounds(node: dict[str, Any]) -> dict[str, Any]:
    bounds, integer = _bounds(node)
    unsound = _unsound(bounds, integer)
    if not unsound:
        return node
    error = _InexactError(unsound[0], bounds[unsound[0]], "is a bound that llguidance cannot hold exactly")
    if any(value != value for value in bounds.values()):
        raise error
    # An upper bound is a lower one of the negative numbers.
    lower = {key: value for key, value in bounds.items() if key.lower().endswith("minimum")}
    upper = {key.replace("Max", "Min").replace("max", "min"): -bounds[key] for key in bounds.keys() - lower.keys()}
    lowest = _lowest_integer if integer else _lowest_decimal
    low, high = lowest(lower, upper), lowest(upper, lower)
    if integer or max(abs(bound) for bound in (low, high) if bound is not None) >= _LONG:  # llguidance needs both
        most = _MOST if integer else int(_MOST_DECIMAL)
        low, high = -most if low is None else low, -most if high is None else high
    if low is not None and high is not None and low > -high:
        raise error
    rest = {key: value for key, value in node.items() if key not in _BOUNDS}
    return rest | ({} if low is None else {"minimum": low}) | ({} if high is None else {"maximum": -high})


def _bounds(node: Mapping[str, Any]) -> tuple[dict[str, float], bool]:
    """The bounds of a number, and whether it is an integer."""
    types = node.get("type")
    types = [types] if isinstance(types, str) else types if isinstance(types, list) else ["number"]
    bounds = {key: node[key] for key in _BOUNDS if _is_number(node.get(key))}
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if node.get(exclusive) is True and bound in bounds:  # draft 4
            bounds[exclusive] = bounds.pop(bound)
    return bounds, "integer" in types and "number" not in types


def _unsound(bounds: Mapping[str, float], integer: bool) -> list[str]:
    """The keywords of bounds beyond which llguidance admits something."""
    return [key for key, value in bounds.items() if not _is_sound(key, value, integer)]


def _is_sound(key: str, value: float, integer: bool) -> bool:
    if integer:
        return abs(value) < _EXACT - 1
    if not (abs(value) < _EXACT - 1 and _is_held(value)):
        return False
    return not (key.startswith("exclusive") and value == int(value))


def _lowest_integer(lower: Mapping[str, float], upper: Mapping[str, float]) -> int | None:
    """The smallest integer within lower bounds that is a float64."""
    clipped = {key: max(min(_decimals(value)[-1], Decimal(2 * _MOST)), Decimal(-_MOST)) for key, value in lower.items()}
    lows = [math.ceil(clipped["minimum"])] if "minimum" in clipped else []
    lows += [math.floor(clipped["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in clipped else []
    if not lows:
        return None
    spacing = max(int(math.ulp(float(max(lows)))), 1)
    return -(-max(lows) // spacing) * spacing


def _lowest_decimal(lower: Mapping[str, float], upper: Mapping[str, float]) -> int | float | None:
    """The smallest number of 16 or 15 digits within lower bounds; `upper` are the negatives of upper bounds."""
    if not lower:
        return None
    low, exclusive = max((_decimals(value)[-1], key != "minimum") for key, value in lower.items())
    low = max(low, -_MOST_DECIMAL)
    if low > _MOST_DECIMAL:
        return math.inf
    nearest = min((-value for value in upper.values() if value < 0), default=1.0)
    smallest = min(Decimal("1E-16"), Decimal(1).scaleb(Decimal(repr(nearest)).adjusted() - 1))
    for digits in (16, 15):
        quantum = Decimal(1).scaleb(low.adjusted() + 1 - digits) if low else smallest
        result = low.quantize(quantum, ROUND_CEILING, _CONTEXT)
        while (least := _decimals(float(result))[0]) < low or (exclusive and least == low):
            result += quantum
        if _is_held(float(result)):
            break
    return int(result) if result == result.to_integral_value() else float(result)


def _decimals(value: float) -> list[Decimal]:
    """The number that is written for a float64 and the one that it is, in their order."""
    return sorted((Decimal(repr(value)), Decimal(value)))


# --- what a grammar can leave out -------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _loosened(text: str) -> tuple[str, tuple[str, ...]]:
    """`loosened` of a schema's text, and what was left out."""
    root = json.loads(text)
    loosening = _Loosening(root)
    schema = loosening.of(root)
    return json.dumps(schema), tuple(sorted(loosening.left_out))


class _Loosening:
    """Finds the keywords of one schema that llguidance cannot hold."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.left_out: set[str] = set()
        self._root = root
        self._trials = 0

    def of(self, root: Mapping[str, Any]) -> Any:
        """The schema without them."""
        try:
            schema = _mapped(root, self._without_inexact)
            if self._holds(schema):
                return schema
            schema = _mapped(schema, self._without_unheld)
            for keyword in ("$ref", "allOf", "oneOf", "anyOf"):
                if self._holds(schema):
                    return schema
                self.left_out.add(keyword)
                schema = _mapped(schema, partial(_without, keyword=keyword))
            if self._holds(schema):
                return schema
        except RecursionError:
            pass
        self.left_out = {"all"}
        return {"x-guidance": root.get("x-guidance", {}), "type": "object"} if "type" in root else {}

    def _without_inexact(self, node: dict[str, Any]) -> dict[str, Any]:
        inexact = []
        for keyword in node.keys() & {"const", "enum", "multipleOf"}:
            try:
                _check(keyword, node[keyword])
            except _InexactError:
                inexact.append(keyword)
        inexact += _unsound(*_bounds(node))  # moved inwards they would admit less
        self.left_out.update(inexact)
        return {key: value for key, value in node.items() if key not in inexact}

    def _without_unheld(self, node: dict[str, Any]) -> dict[str, Any]:
        """The schema without keywords with which it does not compile, whatever is in them."""
        node = {
            key: _below(key, value, lambda child: child if _is_schema(child) else True) for key, value in node.items()
        }
        if "$ref" in node and not self._resolves(node["$ref"]):
            self.left_out.add("$ref")
            node = _without(node, "$ref")
        while not self._holds(_own(node)):
            smaller = {keyword: _without(node, keyword) for keyword in sorted(node, key=_KEPT_LONGEST.__contains__)}
            keyword = next((k for k in smaller if self._holds(_own(smaller[k]))), next(iter(smaller)))
            self.left_out.add(keyword)
            node = smaller[keyword]
        return node

    def _resolves(self, reference: Any) -> bool:
        """Whether a reference is a pointer into the schema."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return False
        node: Any = self._root
        for key in reference.split("/")[1:]:
            node = node.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
        return _is_schema(node)

    def _holds(self, schema: Any) -> bool:
        """Whether llguidance compiles a schema; it says then which keywords it left out."""
        from llguidance import LLMatcher

        self._trials += 1
        if schema in (True, {}):
            return True
        if self._trials > _TRIALS:
            return False
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": True})
            failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        except BaseException as error:
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            return False
        if not failed:
            for message in messages:
                self.left_out.update(_names_in(message))
        return not failed


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _own(node: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with nothing in the schemas in it, and without references."""
    return {
        key: _below(key, value, lambda child: True if isinstance(child, Mapping) else child)
        for key, value in node.items()
        if key not in ("$ref", "$defs", "definitions")
    }


def _names_in(message: str) -> list[str]:
    """The keywords that a warning of llguidance says are not followed."""
    if message.startswith("Unknown format: "):
        return [f"format {message.removeprefix('Unknown format: ')}"]
    if message.startswith("oneOf"):
        return ["oneOf"]
    return re.findall(r'"([^"]+)"', message)
