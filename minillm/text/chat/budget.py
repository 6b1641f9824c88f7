"""The budget of rendering a chat template (steps, nesting, output, time), and what each operation costs.

A step takes about a microsecond in Python: evaluating a node of the template, visiting a list element, or reading or
writing 64 characters of text. Every operation is charged before it runs, so none can exceed the remaining budget, and
both time and memory are bounded. The budget grows with the conversation.

Operators, filters, tests and methods that can make a small value large (`'x' * n`, `center`, `'%9999d'`) are charged
for the size of their result; those that can be slow otherwise, for their worst case. Methods that templates do not need
or that are hard to bound (`encode`, `translate`, `to_bytes`) are not offered.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from string import Formatter
from time import monotonic
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.tests import TESTS
from jinja2.utils import Namespace

_MOST_BITS = 2**15  # of an integer; JSON's have up to 4,300 digits
_WIDEST = 1000  # width of a format field, or of an indentation
_NEEDLE = 100  # characters up to which a search may take quadratic time; beyond, Python searches in linear time
_DIGITS = re.compile(r"\d{4,}")
_SPEC = re.compile(r"[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?")  # the part after % and an optional name in parentheses

STEPS = 300_000
"""Base budget of any conversation. Templates of published models take about 100 steps per message."""
STEPS_PER_VALUE = 2_000
"""Additional steps for each text, number, list or object of the conversation; and one for each character."""
SECONDS = 20.0
"""Base time limit; plus 1 s for each million steps beyond `STEPS`"""
DEPTH = 100
"""Maximum nesting of lists, and of calls of macros and recursive loops"""
_LOG_CHARACTERS = 6  # 64 in a step
OUTPUT = 4_000_000
"""Base limit of rendered characters; plus 16 for each character and 1,000 for each value of the conversation"""


class BudgetError(SecurityError):
    """A template exceeds its steps, output or time, or nests too deeply."""


class Once(Iterator[Any]):
    """An iterator over a filter's results. Unlike Jinja's generators it does not nest without limit."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.at = 0

    def __next__(self) -> Any:
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]


class Budget:
    """Remaining budget of one rendering."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        """Set the limits from the size of the conversation and the other variables."""
        values, characters = _size(variables)
        self.steps = self.total = STEPS + STEPS_PER_VALUE * values + characters
        self.output = OUTPUT + 1000 * values + 16 * characters
        self.depth = 0
        self.deadline = monotonic() + SECONDS + (self.total - STEPS) / 1e6
        self._next_look = self.steps

    def charge(self, steps: int) -> None:
        """Subtract steps from the budget; a negative number, as of a negative width, counts as none.

        Raises:
            BudgetError: the steps or the time are used up.
        """
        self.steps -= max(steps, 0)
        if self.steps >= self._next_look:
            return
        if self.steps < 0:
            raise BudgetError(f"it would take more than {self.total:,} steps or {64 * self.total:,} characters")
        if monotonic() > self.deadline:
            raise BudgetError("it takes too long")
        self._next_look = max(0, self.steps - 1000)

    def charge_text(self, characters: int) -> None:
        """Charge for reading or writing `characters` characters."""
        self.charge(1 + (characters >> _LOG_CHARACTERS))

    def write(self, characters: int) -> None:
        """Subtract from the remaining output.

        Raises:
            BudgetError: the output is too long.
        """
        self.output -= characters
        if self.output < 0:
            raise BudgetError("its output is far longer than the conversation")

    def weigh(self, value: Any) -> int:
        """Charge for a value with all its contents (repeats included), and return its size in characters.

        Raises:
            BudgetError: it is too large, or nested too deeply.
        """
        if isinstance(value, str):
            self.charge_text(len(value))
            return len(value)
        pending = [(value, 0)]
        characters = 0
        while pending:
            item, depth = pending.pop()
            inside = _inside(item)
            if inside is None:
                count = len(item) if isinstance(item, str) else 8
                characters += count
                self.charge_text(count)
                continue
            self.charge(1)
            if depth > DEPTH:
                raise BudgetError(f"it nests lists more than {DEPTH} deep")
            for part in inside:
                self.charge(1)
                characters += 2
                pending.append((part, depth + 1))
        return characters

    def items(self, values: Iterable[Any]) -> list[Any]:
        """List of an iterable's elements, charged one by one."""
        found = []
        for value in values:
            self.charge(1)
            found.append(value)
        return found

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Count one more nested call inside the block.

        Raises:
            BudgetError: calls are nested too deeply.
        """
        if self.depth == DEPTH:
            raise BudgetError(f"endless recursion: it calls itself more than {DEPTH} times deep")
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


CURRENT: ContextVar[Budget] = ContextVar("minillm_chat_budget")
"""Budget of the current rendering"""


@contextmanager
def budget_for(variables: Mapping[str, Any]) -> Iterator[Budget]:
    """Make a new budget, the current one inside the block."""
    token = CURRENT.set(Budget(variables))
    try:
        yield CURRENT.get()
    finally:
        CURRENT.reset(token)


def _inside(value: Any) -> Iterable[Any] | None:
    """Contents of a container; None for other values."""
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, dict):
        return (part for pair in value.items() for part in pair)
    if isinstance(value, Namespace):
        return _inside(object.__getattribute__(value, "_Namespace__attrs"))
    if isinstance(value, Once):
        return value.items[value.at :]
    if isinstance(value, type({}.items()) | type({}.values()) | type({}.keys())):
        return value
    return None


def _size(value: Any) -> tuple[int, int]:
    """Number of values in JSON data, and of characters in them."""
    values = characters = 0
    pending = [value]
    while pending:
        item = pending.pop()
        values += 1
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
    return values, characters


def weighed(value: Any) -> Any:
    """Charge for reading or comparing a value, and return it."""
    CURRENT.get().weigh(value)
    return value


def charged(steps: int) -> bool:
    """Charge the steps of a piece of the template; always True."""
    CURRENT.get().charge(steps)
    return True


# --- operators --------------------------------------------------------------------------------------------------------


def charge_operator(operator: str, left: Any, right: Any) -> None:
    """Charge for a binary operation of the template."""
    budget = CURRENT.get()
    budget.charge(1)
    if isinstance(left, str) and operator == "%":
        charge_percent(left, right)
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str) and isinstance(times, int):
                budget.charge_text(len(sequence) * max(times, 0))
            elif isinstance(sequence, list | tuple) and isinstance(times, int):
                budget.charge(len(sequence) * max(times, 0))
    elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        budget.charge_text(_growth(left) * len(left) + _growth(right) * len(right))
    if isinstance(left, int) and isinstance(right, int):
        _check_whole(operator, left, right)


def _growth(value: Any) -> int:
    """Size in characters of one element of a text or list; escaped text can grow while it is joined."""
    return (8 if type(value) is not str else 1) if isinstance(value, str) else 8


def _check_whole(operator: str, left: int, right: int) -> None:
    bits = max(left.bit_length(), right.bit_length())
    if operator == "**" and right > 0:
        bits = max(bits, left.bit_length() * right)
    if bits > _MOST_BITS:
        raise BudgetError(f"it computes with integers of more than {_MOST_BITS:,} bits")


def charge_percent(form: str, values: Any) -> None:
    """Charge for `form % values`."""
    budget = CURRENT.get()
    budget.charge_text(len(form))
    specs = at = 0
    while (at := form.find("%", at) + 1) > 0:
        specs += 1
        found = _SPEC.match(form, _after_name(form, at))
        assert found is not None  # it also matches the empty string
        for number in found.groups():
            if number is not None and (number == "*" or len(number) > 9 or int(number) > _WIDEST):
                raise BudgetError(f"it formats a value wider than {_WIDEST} characters")
        at = max(found.end(), at + (form[at : at + 1] == "%"))
    size = budget.weigh(values)
    budget.charge_text(specs * (size + _WIDEST // 8))


def _after_name(form: str, at: int) -> int:
    """Index after a parenthesised name, which may contain parentheses; `at` if there is none."""
    depth = 0
    for i in range(at, len(form)):
        depth += (form[i] == "(") - (form[i] == ")")
        if depth == 0:
            return i + (form[i] == ")")
    return at


def charge_format(form: str, values: Any) -> None:
    """Charge for `form.format(...)`; `values` holds positional and named arguments."""
    budget = CURRENT.get()
    budget.charge_text(len(form))
    fields = 0
    for _, name, spec, _ in Formatter().parse(form):
        if name is None:
            continue
        fields += 1
        if spec and ("{" in spec or any(len(n) > 9 or int(n) > _WIDEST for n in _DIGITS.findall(spec))):
            raise BudgetError(f"it formats a value wider than {_WIDEST} characters, or with a computed width")
    size = budget.weigh(values)
    budget.charge_text(fields * (size + _WIDEST // 8))


# --- methods ----------------------------------------------------------------------------------------------------------

_PLAIN = [
    "capitalize", "casefold", "endswith", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier",
    "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower", "removeprefix", "removesuffix",
    "startswith", "swapcase", "title", "upper",
]  # fmt: skip
_SEARCHES = ["count", "find", "index", "partition", "lstrip", "rstrip", "strip"]
_BACKWARD = ["rfind", "rindex", "rpartition"]
_SPLITS = ["split", "rsplit", "splitlines"]
_PADS = ["center", "ljust", "rjust", "zfill"]

METHODS: dict[type, frozenset[str]] = {
    str: frozenset([*_PLAIN, *_SEARCHES, *_BACKWARD, *_SPLITS, *_PADS, "expandtabs", "format", "join", "replace"]),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    int: frozenset({"bit_length", "conjugate"}),
    float: frozenset({"is_integer"}),
    range: frozenset({"count", "index"}),
}
"""Methods of Python's types that a template may call. Others have no bound on their cost."""


def charge_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Charge for a method call. Returns the arguments, with iterators among them turned into lists if necessary.

    Raises:
        SecurityError: the method is not offered.
        BudgetError: the budget is used up.
    """
    kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
    if kind is None or name not in METHODS[kind]:
        raise SecurityError(f"the method {name!r:.40} of {type(owner).__name__!r} is not available to chat templates")
    budget = CURRENT.get()
    if kind is not str:
        budget.charge_text(8 * len(owner) if name in ("copy", "count", "index") and hasattr(owner, "__len__") else 1)
        budget.weigh(args)
        if name in ("count", "index"):
            budget.weigh(owner)
        return args
    if name == "join" and len(args) == 1 and not isinstance(args[0], str):
        args = (budget.items(args[0]),)
    budget.weigh([args, kwargs] if kwargs else args)
    _charge_text_method(budget, owner, name, (*args, *kwargs.values()))
    return args


def _charge_text_method(budget: Budget, text: str, name: str, args: tuple[Any, ...]) -> None:
    length = len(text)
    number = max([0, *(n for n in args if isinstance(n, int))])
    needle = max((len(n) for n in args if isinstance(n, str)), default=1)
    budget.charge_text(length * (8 if type(text) is not str else 1))
    if name in _PADS:
        budget.charge_text(number)
    elif name == "expandtabs":
        budget.charge_text(text.count("\t") * max(number, 8))
    elif name == "join":
        budget.charge_text(length * len(args[0]) if args else 0)
    elif name == "replace":
        charge_replace(text, *args)
    elif name in _SPLITS:
        _charge_split(budget, text, name, args, needle)
    elif name in _BACKWARD:
        budget.charge_text(length * needle // 8)
    elif name in _SEARCHES:
        budget.charge_text(length * min(needle, _NEEDLE) // 8)


def _charge_split(budget: Budget, text: str, name: str, args: tuple[Any, ...], needle: int) -> None:
    budget.charge_text(len(text) * (needle if name == "rsplit" else min(needle, _NEEDLE)) // 8)
    separator = next((part for part in args if isinstance(part, str) and part), None)
    budget.charge(len(text) // 2 if separator is None or name == "splitlines" else text.count(separator))


def charge_replace(text: str, old: Any = "", new: Any = "", *_: Any) -> None:
    """Charge for `text.replace(old, new)`."""
    budget = CURRENT.get()
    if isinstance(old, str) and isinstance(new, str):
        budget.charge_text(len(text) * (1 + min(len(old), _NEEDLE) // 8))
        budget.charge_text(text.count(old) * len(new))


# --- filters ----------------------------------------------------------------------------------------------------------


def _width(*numbers: Any) -> int:
    """The largest number or text length among some arguments, at least 0."""
    sizes = [len(n) if isinstance(n, str) else n for n in numbers if isinstance(n, str | int | float)]
    return int(min(max([0, *sizes]), 1e15))


def _count(value: Any) -> int:
    try:
        return len(value)
    except TypeError:
        return len(value.items) if isinstance(value, Once) else 1


def _indent_cost(value: Any, size: int, args: tuple[Any, ...]) -> int:
    lines = len(value.splitlines()) if isinstance(value, str) else size
    return (1 + lines) * (1 + _width(*args))


def _join_cost(value: Any, size: int, args: tuple[Any, ...]) -> int:
    return 8 * size + _count(value) * _width(*(arg for arg in args if isinstance(arg, str)))


def _round_cost(value: Any, size: int, args: tuple[Any, ...]) -> int:
    if any(isinstance(n, int | float) and abs(n) > 300 for n in args):
        raise BudgetError("it rounds to more than 300 digits")
    return 0


def _replace_cost(value: Any, size: int, args: tuple[Any, ...]) -> int:
    charge_replace(value if isinstance(value, str) else "", *args)
    return 0


def _format_cost(value: Any, size: int, args: tuple[Any, ...]) -> int:
    charge_percent(str(value), args)
    return 0


# Filters that pass elements on, or read few of them: charged by the number of elements, not their contents.
_SHALLOW = [
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject",
    "rejectattr", "reverse", "safe", "select", "selectattr", "slice",
]  # fmt: skip

_COSTS: dict[str, Callable[[Any, int, tuple[Any, ...]], int]] = {
    **dict.fromkeys(_SHALLOW, lambda value, size, args: 0),
    **dict.fromkeys(
        ["abs", "capitalize", "filesizeformat", "float", "int", "lower", "string", "title", "upper", "wordcount"],
        lambda value, size, args: 0,
    ),
    **dict.fromkeys(["batch", "slice"], lambda value, size, args: 64 * _width(*args)),
    **dict.fromkeys(["center", "trim", "truncate"], lambda value, size, args: _width(*args)),
    **dict.fromkeys(
        ["dictsort", "groupby", "max", "min", "sort", "unique"],
        lambda value, size, args: size * max(1, size.bit_length()),
    ),
    **dict.fromkeys(["e", "escape", "forceescape", "join", "urlencode"], _join_cost),
    **dict.fromkeys(
        ["pprint", "striptags", "urlize", "wordwrap", "xmlattr"],
        lambda value, size, args: size * (16 + size // 8) + 8 * _width(*args) * (1 + size),
    ),
    "format": _format_cost,
    "indent": _indent_cost,
    "replace": _replace_cost,
    "round": _round_cost,
}
"""Characters to charge for each filter, from (value, size of value and arguments, arguments). Reading the value and its
contents is charged before; for a filter in `_SHALLOW`, only the number of its elements."""


def charging_filters() -> dict[str, Callable[..., Any]]:
    """Jinja's filters, wrapped to charge before they run; the environment replaces `sum` and `tojson`."""
    return {name: _charging(name, FILTERS[name], cost) for name, cost in _COSTS.items()}


def _charging(name: str, function: Callable[..., Any], cost: Callable[..., int]) -> Callable[..., Any]:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or the context comes before the value
    shallow = name in _SHALLOW

    @wraps(function)
    def charging(*args: Any, **kwargs: Any) -> Any:
        budget = CURRENT.get()
        value, others = args[first] if len(args) > first else None, (*args[first + 1 :], *kwargs.values())
        if shallow:
            budget.charge(1 + (0 if isinstance(value, str) else _count(value)))
            size = 0
        else:
            size = budget.weigh(value)
        size += sum(budget.weigh(other) for other in others)
        budget.charge_text(cost(value, size, others))
        return _kept(budget, name, function(*args, **kwargs))

    return charging


_NESTING = frozenset({"batch", "dictsort", "groupby", "items", "list", "map", "slice"})
"""Filters whose result is nested one level deeper than their input"""


def _kept(budget: Budget, name: str, result: Any) -> Any:
    """A filter's result with generators exhausted, so that all work is done and charged now."""
    if isinstance(result, Iterator) and not isinstance(result, Once):
        result = Once(budget.items(result))
    if name in _NESTING:
        budget.weigh(result)
    elif isinstance(result, str | list | tuple):
        budget.charge_text(len(result) * (8 if not isinstance(result, str) else 1))
    return result


# --- tests ------------------------------------------------------------------------------------------------------------

_COMPARING = [
    "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">=", "in",
    "lower", "upper",
]  # fmt: skip


def charging_tests() -> dict[str, Callable[..., Any]]:
    """Jinja's tests; those that compare charge for their operands."""
    tests: dict[str, Any] = {**TESTS}
    return tests | {name: _comparing(tests[name]) for name in _COMPARING}


def _comparing(test: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(test)
    def comparing(*args: Any) -> Any:
        charge_comparison(args)
        return test(*args)

    return comparing


def charge_comparison(values: tuple[Any, ...]) -> None:
    """Charge for comparing values: nothing if one of them is a number, None or short text."""
    budget = CURRENT.get()
    budget.charge(1)
    for value in values:
        if not isinstance(value, str | int | float | None):
            budget.weigh(value)
    texts = sorted(len(value) for value in values if isinstance(value, str))
    if len(texts) == 2:
        budget.charge_text(texts[1] * (1 + min(texts[0], _NEEDLE) // 8))
