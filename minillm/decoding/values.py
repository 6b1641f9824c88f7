"""Readers of users' values: each converts a value to one type, or raises ValueError.

Limits are defined here so that they are checked before any work is done.
"""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """A function from any value to T, or ValueError; and what it accepts, in words."""

    expected: str
    read: Callable[[object], T]
    word: type[int] | type[float] | type[str] = str
    """The type of a value, or of a member, on a command line"""
    many: bool = False
    """True if it takes one value or a sequence of them"""

    def __call__(self, value: object) -> T:
        """The value as T; ValueError if it cannot be one."""
        return self.read(value)


def reader(
    expected: str, word: type[int] | type[float] | type[str] = str
) -> Callable[[Callable[[object], T]], Reader[T]]:
    """Decorator: a `Reader` of what the function reads."""
    return lambda read: Reader(expected, read, word)


def whole(least: float, below: float = WORD) -> Reader[int]:
    """A reader of whole numbers from `least` to less than `below`."""

    @reader(f"a whole number of at least {least}", int)
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or not max(least, -WORD) <= int(value) < below:
            raise ValueError
        return int(value)

    return read


def number(least: float, most: float, *, above: bool = False, below: bool = False) -> Reader[float]:
    """A reader of finite numbers from `least` to `most`; without `least` if `above`, without `most` if `below`."""
    lower = f"above {least:g} and" if above else f"from {least:g}"

    def inside(value: Any) -> bool:  # False for NaN
        return bool((least < value if above else least <= value) and (value < most if below else value <= most))

    @reader(f"a number {lower} {'at most' if above else 'to below' if below else 'to'} {most:g}", float)
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real) or not inside(value):
            raise ValueError
        return float(value)

    return read


positive = replace(number(SMALL, LARGE), expected=f"a number above 0 ({SMALL} to {LARGE})")
"""Numbers that logits can be multiplied or divided by."""


@reader("True or False")
def flag(value: object) -> bool:
    """Truth values, nothing equal to one."""
    if not isinstance(value, bool):
        raise ValueError
    return value


@reader("True, False or 'never'")
def stopping_rule(value: object) -> bool | Literal["never"]:
    """Values of early_stopping."""
    return "never" if isinstance(value, str) and value == "never" else flag(value)


@reader("2 for Mirostat 2.0, or 0 for none", int)
def mirostat_version(value: object) -> int:
    """Values of mirostat."""
    version = whole(0)(value)
    if version not in (0, 2):
        raise ValueError
    return version


@reader("a text that is not empty")
def text(value: object) -> str:
    """Texts that can be encoded as UTF-8 and are not too long."""
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


@reader("a JSON schema: an object, or its text")
def schema(value: object) -> str:
    """JSON schemas, converted to text with the keys in their order."""
    try:
        parsed = json.loads(text(value)) if isinstance(value, str) else value
        if not isinstance(parsed, dict):
            raise ValueError
        text(json.dumps(parsed, allow_nan=False, ensure_ascii=False))
        return json.dumps(parsed, allow_nan=False)
    except (TypeError, RecursionError):
        raise ValueError from None


def sequence(
    expected: str, read_one: Reader[T], *, least: int = 0, single: type | None = None
) -> Reader[tuple[T, ...]]:
    """A reader of sequences of at least `least` members.

    With `single`, one value of that type stands for a sequence of one; duplicates are dropped.
    """

    def read(value: object) -> tuple[T, ...]:
        if single is not None and isinstance(value, single):
            return (read_one(value),)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
            raise ValueError
        try:
            fits = least <= len(value) <= LONGEST
        except OverflowError:
            fits = False
        if not fits:
            raise ValueError
        members = tuple(read_one(item) for item in value)
        return members if single is None else tuple(dict.fromkeys(members))

    return Reader(expected, read, read_one.word, many=single is not None)


def token_ids(least: float = 0) -> Reader[tuple[int, ...]]:
    """A reader of one token id or a sequence of them."""
    return sequence("a token id or a sequence of token ids", whole(least), single=Integral)


def texts(least: int = 0) -> Reader[tuple[str, ...]]:
    """A reader of one text or a sequence of at least `least`, within the limits."""
    none_empty = "at least one and none empty" if least else "none of them empty"
    several = sequence(f"a text or a sequence of texts, {none_empty}", text, least=least, single=str)

    def read(value: object) -> tuple[str, ...]:
        if isinstance(value, list | tuple) and len(value) > MOST_TEXTS:
            raise RefusedError(f"there are {len(value)} texts, and may be {MOST_TEXTS}")
        texts = several(value)
        total = sum(map(len, texts))
        if total > MOST_CHARACTERS:
            raise RefusedError(f"the texts have {total} characters together, and may have {MOST_CHARACTERS}")
        return texts

    return replace(several, read=read)


@reader("a text or a sequence of token ids")
def text_or_ids(value: object) -> str | tuple[int, ...]:
    """A text, which may be empty, or token ids."""
    return (value and text(value)) if isinstance(value, str) else sequence("", whole(0))(value)


phrase = sequence("token ids, at least one", whole(0), least=1)
phrases = sequence("a sequence of sequences of token ids, none empty", phrase)
pair = sequence("two values", Reader("any value", lambda value: value), least=2)


@reader("pairs of token ids and a bias, such as [[[10, 45], -2.0], [[64], 7.5]]")
def biases(value: object) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Sequence biases in either form that transformers accepts; the last bias of a sequence counts."""
    items = sequence("pairs", pair)(list(value.items()) if isinstance(value, Mapping) else value)
    finite = number(-LARGE, LARGE)
    bias_of = {
        phrase(ids): bias if isinstance(bias, float) and bias == -math.inf else finite(bias) for ids, bias in items
    }
    return tuple(bias_of.items())


@reader(f"a pair: a whole number of tokens, and a factor ({SMALL} to {LARGE})")
def decay(value: object) -> tuple[int, float]:
    """Values of exponential_decay_length_penalty."""
    start, factor = pair(value)  # ValueError if there are more
    return whole(0)(start), positive(factor)


@dataclass(frozen=True, eq=False)
class ByIdentity:
    """A user's function, compared and hashed by identity, so that settings that hold it are hashable."""

    function: Callable[..., Any]
    arguments: int = 0
    """Number of positional arguments that it takes, of those that were offered"""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.function is self.function

    def __hash__(self) -> int:
        return id(self.function)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def function(expected: str, *arguments: int) -> Reader[ByIdentity]:
    """A reader of functions that take so many positional arguments, the first of these numbers that fits.

    Objects of transformers' classes take the last one, whatever further arguments they would take.
    """

    @reader(expected)
    def read(value: object) -> ByIdentity:
        if not callable(value):
            raise ValueError
        try:
            signature = inspect.signature(value)
        except ValueError:  # some built-in functions have no signature
            return ByIdentity(value, arguments[0])
        theirs = any(kind.__module__.startswith("transformers.") for kind in type(value).__mro__)
        for count in arguments[-1:] if theirs else arguments:
            try:
                signature.bind(*[None] * count)
            except TypeError:
                continue
            return ByIdentity(value, count)
        raise ValueError

    return read
