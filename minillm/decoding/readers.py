"""Readers that convert a user's value for a field to its type in Settings, or raise ValueError.

Limits are defined here so that they are checked before any work is done.
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
"""Integers below it fit into an int64 array."""
LONGEST = 2**20
"""Most members of a sequence."""
MOST_TEXTS = 10_000
"""Most stop strings or choices of one request."""
MOST_CHARACTERS = 100_000
"""Most characters of all stop strings, or of a guide (schema, expression, grammar, choices): about 0.5 s of work."""


class RefusedError(ValueError):
    """A value of the right type that is refused; the message gives the reason."""


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
    """A reader of numbers. `allowed` must bound them on both sides, so that NaN and infinity are refused."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real) or not allowed(value):
            raise ValueError
        return float(value)

    return read


def several(kind: type, read_one: Callable[[object], Any]) -> Callable[[object], tuple[Any, ...]]:
    """A reader of one value of `kind` or a sequence of them, each read by `read_one`, without duplicates."""

    def read(value: object) -> tuple[Any, ...]:
        values = [value] if isinstance(value, kind) else value
        return tuple(dict.fromkeys(each(read_one)(values)))

    return read


def text(value: object) -> str:
    """A non-empty text that can be encoded as UTF-8 and is not too long."""
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
    """One text or a sequence of texts, within the limits."""
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
    """A reader of sequences, each member read by `read_one`."""

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
        first, second = each(lambda one: one)(value)  # a wrong number of members raises ValueError too
        return read_first(first), read_second(second)

    return read


def biases(value: object) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Sequence biases in either form that transformers accepts; the last bias of a sequence counts."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    bias = number(lambda x: -LARGE <= x <= LARGE or x == -math.inf)
    return tuple(dict(each(pair(token_ids, bias))(pairs)).items())


@dataclass(frozen=True, eq=False)
class ByIdentity:
    """A user's function, compared and hashed by identity, so that settings that hold it are hashable."""

    function: Callable[..., Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.function is self.function

    def __hash__(self) -> int:
        return id(self.function)


def function(arguments: int) -> Callable[[object], ByIdentity]:
    """A reader of functions that take `arguments` positional arguments."""

    def read(value: object) -> ByIdentity:
        if not callable(value):
            raise ValueError
        try:
            signature = inspect.signature(value)
        except ValueError:  # some built-in functions have no signature
            return ByIdentity(value)
        try:
            signature.bind(*[None] * arguments)
        except TypeError:
            raise ValueError from None
        return ByIdentity(value)

    return read
