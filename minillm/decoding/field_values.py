"""Readers of the values of particular generation fields: guides, stop strings, biases, functions and the like."""

import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal

from ..errors import ParameterError, shown
from ..plugins import GROUPS, load
from .values import (
    LARGE,
    MOST_CHARACTERS,
    SMALL,
    Reader,
    RefusedError,
    flag,
    number,
    positive,
    reader,
    sequence,
    text,
    whole,
)

MOST_TEXTS = 10_000
"""Most stop strings or choices of one request."""


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


@reader("two markers, each a text or token ids, such as ['<think>', '</think>']")
def markers(value: object) -> tuple[str | tuple[int, ...], str | tuple[int, ...]]:
    """Values of thinking_tokens."""
    begin, end = (
        text(marker) if isinstance(marker, str) else phrase([marker] if isinstance(marker, Integral) else marker)
        for marker in pair(value)
    )
    return begin, end


@reader("")
def _alternatives(value: object) -> tuple[tuple[int, ...], ...]:
    """A phrase, or several of which one is enough."""
    from .constraints import redundant

    several = isinstance(value, list | tuple) and not all(isinstance(member, Integral) for member in value)
    alternatives = phrases(value) if several else (phrase(value),)
    if (pair := redundant(alternatives)) is not None:
        shorter, longer = map(list, pair)
        raise RefusedError(f"the phrase {longer} begins with {shorter}, an alternative: leave it out")
    return alternatives


forced_phrases = sequence("phrases of token ids, or lists of them, such as [[5, 6], [[7], [8, 9]]]", _alternatives)

_texts = texts(1)

forced_texts = sequence(
    "a text or a sequence of texts, or of lists of them, none empty", replace(_texts, many=False), single=str
)

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


@reader("'low', 'high', or numbers of layers, at least one")
def exit_layers(value: object) -> str | tuple[int, ...]:
    """Values of dola_layers; a text may list numbers, "0,2,4"."""
    if value in ("low", "high"):
        return str(value)
    numbers = [int(number) for number in value.split(",")] if isinstance(value, str) else value
    return sequence("", whole(0), least=1)(numbers)


@dataclass(frozen=True, eq=False)
class ByIdentity:
    """A user's function, compared and hashed by identity, so that settings that hold it are hashable."""

    function: Callable[..., Any]
    arguments: int = 0
    """Number of positional arguments that it takes, of those that were offered"""
    plugin: str = ""
    """Kind and name, as in "potential 'rhyme'", if it is another package's; else empty"""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.function is self.function

    def __hash__(self) -> int:
        return id(self.function)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


@reader("a dict of options by name (on a command line NAME=VALUE)")
def options(value: object) -> tuple[tuple[str, Any], ...]:
    """Options as pairs, so that they are hashable; a command line gives texts NAME=VALUE, where a value may be JSON."""
    if isinstance(value, list | tuple) and all(isinstance(pair, str) and "=" in pair for pair in value):
        value = {name: _json_or_text(text) for name, _, text in (pair.partition("=") for pair in value)}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise ValueError
    return tuple((name, _hashable(member)) for name, member in value.items())


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _hashable(value: Any) -> Any:
    """A value with tuples in the place of lists; functions count by their identity anyhow."""
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    try:
        hash(value)
    except TypeError:
        raise RefusedError(
            f"{shown(value)} is not hashable: give numbers, texts, functions, or lists of them"
        ) from None
    return value


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


_POTENTIAL = function("", 1, 2)


def potential_functions(value: Any) -> tuple[ByIdentity, ByIdentity]:
    """The functions of a potential, for texts that go on and for complete ones; ValueError if it is none."""
    if hasattr(value, "prefix") and hasattr(value, "complete"):
        return _POTENTIAL(value.prefix), _POTENTIAL(value.complete)
    return _POTENTIAL(value), _POTENTIAL(value)


@reader("a function (token ids) or (token ids, text) -> log weight, or an object with methods prefix and complete")
def potential(value: object) -> ByIdentity:
    """A potential of texts, or the name of one of another package."""
    functions, plugin = _of_plugin("minillm.potentials", value)
    if isinstance(functions, type):
        raise ValueError
    potential_functions(functions)
    return ByIdentity(functions, plugin=plugin)  # an object, but held as a function is


_PROCESSOR = function("", 3, 2)
_CONSTRAINT = ("advance", "does_advance", "update", "remaining", "copy")
"""Methods of a constraint"""


@reader("")
def constraint(value: object) -> ByIdentity:
    """A constraint of beam search; transformers' own become ours, whose copies share no state."""
    from .constraints import DisjunctiveConstraint, PhrasalConstraint

    kind, ids = type(value), getattr(value, "token_ids", None)
    if kind.__module__.startswith("transformers.") and kind.__name__ == "PhrasalConstraint":
        value = PhrasalConstraint(phrase(ids))
    elif kind.__module__.startswith("transformers.") and kind.__name__ == "DisjunctiveConstraint":
        value = DisjunctiveConstraint(phrases(ids))
    methods = all(callable(getattr(value, name, None)) for name in _CONSTRAINT)
    if isinstance(value, type) or not methods or not isinstance(getattr(value, "seqlen", None), int):
        raise ValueError
    return ByIdentity(value)  # type: ignore[arg-type]  # not a function, but held as one is


@reader("")
def processor(value: object) -> ByIdentity:
    """A logits processor: a function (history, logits, xp) or (input_ids, scores), or the name of an installed one."""
    function, plugin = _of_plugin("minillm.processors", value)
    return replace(_PROCESSOR(function), plugin=plugin)


def _of_plugin(group: str, value: object) -> tuple[Any, str]:
    """The object that another package has by a name, and its kind and name; anything else than a name as it is."""
    if not isinstance(value, str):
        return value, ""
    try:
        return load(group, value), f"{GROUPS[group]} {value!r}"
    except ParameterError as error:
        raise RefusedError(str(error)) from None
