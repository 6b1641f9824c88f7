"""Readers of users' values: each converts a value to one type, or raises ValueError.

Limits are defined here so that they are checked before any work is done.
"""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")

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


@dataclass(frozen=True)
class Reader(Generic[T]):
    """A function from any value to T, with what it accepts in words."""

    expected: str
    read: Callable[[object], T]
    word: type[int] | type[float] | type[str] = str
    """The type of a value, or of a member, on a command line"""
    many: bool = False
    """True if it takes one value or a sequence of them"""

    def __call__(self, value: object) -> T:
        """The value as T; ValueError if it cannot be one."""
        return self.read(value)


def whole(least: float, below: float = WORD) -> Reader[int]:
    """A reader of whole numbers from `least` to less than `below`."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or not max(least, -WORD) <= int(value) < below:
            raise ValueError
        return int(value)

    return Reader(f"a whole number of at least {least}", read, int)


def number(least: float, most: float, *, above: bool = False, below: bool = False) -> Reader[float]:
    """A reader of finite numbers from `least` to `most`; without `least` if `above`, without `most` if `below`."""

    def inside(value: Any) -> bool:  # False for NaN
        return bool((least < value if above else least <= value) and (value < most if below else value <= most))

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real) or not inside(value):
            raise ValueError
        return float(value)

    lower = f"above {least:g} and" if above else f"from {least:g}"
    return Reader(f"a number {lower} {'at most' if above else 'to below' if below else 'to'} {most:g}", read, float)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _text(value: object) -> str:
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


def _schema(value: object) -> str:
    try:
        found = json.loads(text(value)) if isinstance(value, str) else value
        if not isinstance(found, dict):
            raise ValueError
        text(json.dumps(found, allow_nan=False, ensure_ascii=False))
        return json.dumps(found, allow_nan=False)
    except (TypeError, RecursionError):
        raise ValueError from None


def _mirostat(value: object) -> int:
    version = whole(0)(value)
    if version not in (0, 2):
        raise ValueError
    return version


def _early_stopping(value: object) -> bool | Literal["never"]:
    return "never" if isinstance(value, str) and value == "never" else flag(value)


positive = Reader(f"a number above 0 ({SMALL} to {LARGE})", number(SMALL, LARGE), float)
"""Numbers that logits can be multiplied or divided by."""
flag = Reader("True or False", _flag)
text = Reader("a text that is not empty", _text)
"""Texts that can be encoded as UTF-8 and are not too long."""
schema = Reader("a JSON schema: an object, or its text", _schema)
"""JSON schemas, converted to text with the keys in their order."""
mirostat_version = Reader("2 for Mirostat 2.0, or 0 for none", _mirostat, int)
stopping_rule: Reader[bool | Literal["never"]] = Reader("True, False or 'never'", _early_stopping)


def each(read_one: Callable[[object], T], *, single: type | None = None) -> Callable[[object], tuple[T, ...]]:
    """A function that reads sequences, each member by `read_one`; or one value of the type `single`, as a sequence."""

    def read(value: object) -> tuple[T, ...]:
        if single is not None and isinstance(value, single):
            return (read_one(value),)
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


def token_ids(least: float = 0) -> Reader[tuple[int, ...]]:
    """A reader of one token id or a sequence of them, without duplicates."""
    read = each(whole(least), single=Integral)
    return Reader(
        "a token id or a sequence of token ids", lambda value: tuple(dict.fromkeys(read(value))), int, many=True
    )


def texts(least: int = 0) -> Reader[tuple[str, ...]]:
    """A reader of one text or a sequence of at least `least`, without duplicates and within the limits."""

    def read(value: object) -> tuple[str, ...]:
        if isinstance(value, list | tuple) and len(value) > MOST_TEXTS:
            raise RefusedError(f"there are {len(value)} texts, and may be {MOST_TEXTS}")
        found = tuple(dict.fromkeys(each(text, single=str)(value)))
        total = sum(map(len, found))
        if total > MOST_CHARACTERS:
            raise RefusedError(f"the texts have {total} characters together, and may have {MOST_CHARACTERS}")
        if len(found) < least:
            raise ValueError
        return found

    none_empty = "at least one and none empty" if least else "none of them empty"
    return Reader(f"a text or a sequence of texts, {none_empty}", read, many=True)


def _phrase(value: object) -> tuple[int, ...]:
    if ids := each(whole(0))(value):
        return ids
    raise ValueError


def _pair(value: object) -> tuple[object, object]:
    first, second = each(lambda one: one)(value)  # a wrong number of members raises ValueError too
    return first, second


def _biases(value: object) -> tuple[tuple[tuple[int, ...], float], ...]:
    pairs = each(_pair)(list(value.items()) if isinstance(value, Mapping) else value)
    bias = number(-LARGE, LARGE)
    read = {_phrase(ids): one if isinstance(one, float) and one == -math.inf else bias(one) for ids, one in pairs}
    return tuple(read.items())


def _decay(value: object) -> tuple[int, float]:
    start, factor = _pair(value)
    return whole(0)(start), positive(factor)


phrases = Reader("a sequence of sequences of token ids, none empty", each(_phrase))
biases = Reader("pairs of token ids and a bias, such as [[[10, 45], -2.0], [[64], 7.5]]", _biases)
"""Sequence biases in either form that transformers accepts; the last bias of a sequence counts."""
decay = Reader(f"a pair: a whole number of tokens, and a factor ({SMALL} to {LARGE})", _decay)


@dataclass(frozen=True, eq=False)
class ByIdentity:
    """A user's function, compared and hashed by identity, so that settings that hold it are hashable."""

    function: Callable[..., Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.function is self.function

    def __hash__(self) -> int:
        return id(self.function)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def function(expected: str, arguments: int) -> Reader[ByIdentity]:
    """A reader of functions that take `arguments` positional arguments."""

    def read(value: object) -> ByIdentity:
        if not callable(value):
            raise ValueError
        try:
            inspect.signature(value).bind(*[None] * arguments)
        except TypeError:
            raise ValueError from None
        except ValueError:  # some built-in functions have no signature
            pass
        return ByIdentity(value)

    return Reader(expected, read)


def functions(expected: str, arguments: int) -> Reader[tuple[ByIdentity, ...]]:
    """A reader of sequences of such functions."""
    return Reader(expected, each(function("", arguments)))
