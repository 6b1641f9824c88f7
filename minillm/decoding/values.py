"""Readers of users' values: each converts a value to one type, or raises ValueError (`field_values.py` has more).

Limits are defined here so that they are checked before any work is done.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

T = TypeVar("T")

SMALL, LARGE = 1e-30, 1e30
"""Logits multiplied or divided by these stay within the range of float32."""
WORD = 2**63
"""Integers below it fit into an int64 array."""
LONGEST = 2**20
"""Most members of a sequence."""
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


def sequence(
    expected: str, read_one: Reader[T], *, least: int = 0, most: int = LONGEST, single: type | None = None
) -> Reader[tuple[T, ...]]:
    """A reader of sequences of `least` to `most` members.

    With `single`, one value of that type stands for a sequence of one; duplicates are dropped.
    """

    def read(value: object) -> tuple[T, ...]:
        if single is not None and isinstance(value, single):
            return (read_one(value),)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
            raise ValueError
        try:
            fits = least <= len(value) <= most
        except OverflowError:
            fits = False
        if not fits:
            raise ValueError
        members = tuple(read_one(item) for item in value)
        return members if single is None else tuple(dict.fromkeys(members))

    return Reader(expected, read, read_one.word, many=single is not None)
