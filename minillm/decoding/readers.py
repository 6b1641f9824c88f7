"""From what a user wrote for a field to the type that Settings has: each reader raises ValueError for anything else.

Limits stand here so that they are checked before any work is done.
"""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

SMALL, LARGE = 1e-30, 1e30
"""Logits multiplied or divided by these stay within the range of float32."""
WORD = 2**63
"""Whole numbers below it fit into an array."""
LONGEST = 2**20
"""Members of a sequence; a range may have any number of them."""
MOST_TEXTS = 10_000
"""Stop strings or choices of one request."""
MOST_CHARACTERS = 100_000
"""Of all stop strings, or of a guide: a schema, an expression, a grammar, all choices. Takes about half a second."""


class RefusedError(ValueError):
    """The value is of the right type, and is refused for the reason that the message gives."""


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def whole(least: float, below: float = WORD) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or not max(least, -WORD) <= int(value) < below:
            raise ValueError
        return int(value)

    return read


def number(allowed: Callable[[Any], bool]) -> Callable[[object], float]:
    """A number that `allowed` bounds on both sides, so that neither NaN nor infinity passes."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real) or not allowed(value):
            raise ValueError
        return float(value)

    return read


def several(kind: type, read_one: Callable[[object], Any]) -> Callable[[object], tuple[Any, ...]]:
    """One value of `kind` or a sequence of them, each read by `read_one`, without repetitions."""

    def read(value: object) -> tuple[Any, ...]:
        values = [value] if isinstance(value, kind) else value
        return tuple(dict.fromkeys(each(read_one)(values)))

    return read


def text(value: object) -> str:
    """A text that is not empty, that can be encoded and that is not too long."""
    if not isinstance(value, str) or not value:
        raise ValueError
    if len(value) > MOST_CHARACTERS:
        raise RefusedError(f"it has {len(value)} characters, and may have {MOST_CHARACTERS}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        character = value[error.start]
        raise RefusedError(
            f"its character {error.start} is {character!r}, half a surrogate pair: no text has that"
        ) from None
    return value


def texts(value: object) -> tuple[str, ...]:
    """One text or a sequence of texts, neither too many nor together too long."""
    if isinstance(value, list | tuple) and len(value) > MOST_TEXTS:
        raise RefusedError(f"there are {len(value)} texts, and may be {MOST_TEXTS}")
    found: tuple[str, ...] = several(str, text)(value)
    total = sum(map(len, found))
    if total > MOST_CHARACTERS:
        raise RefusedError(f"the texts have {total} characters together, and may have {MOST_CHARACTERS}")
    return found


def one_of(*values: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        number = whole(-math.inf)(value)
        if number not in values:
            raise ValueError
        return number

    return read


def schema(value: object) -> str:
    """A JSON schema as text, its keys in their order."""
    try:
        schema = json.loads(text(value)) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise ValueError
        text(json.dumps(schema, allow_nan=False, ensure_ascii=False))
        return json.dumps(schema, allow_nan=False)
    except (TypeError, RecursionError):
        raise ValueError from None


def choices(value: object) -> tuple[str, ...]:
    if found := texts(value):
        return found
    raise ValueError


def stopping_rule(value: object) -> bool | str:
    return "never" if value == "never" else flag(value)


def each(read_one: Callable[[object], Any]) -> Callable[[object], tuple[Any, ...]]:
    """A sequence, each of whose members is read by `read_one`."""

    def read(value: object) -> tuple[Any, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
            raise ValueError
        try:
            count = len(value)
        except OverflowError:
            raise ValueError from None
        if count > LONGEST:
            raise ValueError
        return tuple(read_one(one) for one in value)

    return read


def token_ids(value: object) -> tuple[int, ...]:
    """At least one token id."""
    if ids := each(whole(0))(value):
        return ids
    raise ValueError


def pair(read_first: Callable[[object], Any], read_second: Callable[[object], Any]) -> Callable[[object], Any]:
    def read(value: object) -> tuple[Any, Any]:
        first, second = each(lambda one: one)(value)  # a wrong number of members is a ValueError too
        return read_first(first), read_second(second)

    return read


def biases(value: object) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Either form that transformers takes; of a sequence that comes twice, the last counts."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    bias = number(lambda x: -LARGE <= x <= LARGE or x == -math.inf)
    return tuple(dict(each(pair(token_ids, bias))(pairs)).items())


@dataclass(frozen=True, eq=False)
class ByIdentity:
    """A function of the user's, equal to itself only: so that settings that hold it can be compared and hashed."""

    function: Callable[..., Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.function is self.function

    def __hash__(self) -> int:
        return id(self.function)


def function(arguments: int) -> Callable[[object], ByIdentity]:
    """A function that can be called with so many arguments."""

    def read(value: object) -> ByIdentity:
        if not callable(value):
            raise ValueError
        try:
            signature = inspect.signature(value)
        except ValueError:  # some built-in functions do not tell theirs
            return ByIdentity(value)
        try:
            signature.bind(*[None] * arguments)
        except TypeError:
            raise ValueError from None
        return ByIdentity(value)

    return read
