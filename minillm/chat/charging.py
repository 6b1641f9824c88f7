"""Costs of chat template operations. Every function here charges the current budget before the work is done.

Operators, filters, tests and methods that can make a small value large (`'x' * n`, `center`, `'%9999d'`) are charged
for the size of their result; those that can be slow otherwise, for their worst case. Methods that templates do not need
or that are hard to bound (`encode`, `translate`, `to_bytes`) are not offered.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.tests import TESTS

from .budget import CURRENT, Budget, BudgetError, Once

_MOST_BITS = 2**15  # of an integer; JSON's have up to 4,300 digits
_WIDEST = 1000  # width of a format field, or of an indentation
_NEEDLE = 100  # characters up to which a search may take quadratic time; beyond, Python searches in linear time
_DIGITS = re.compile(r"\d{4,}")
_SPEC = re.compile(r"[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?")  # the part after % and an optional name in parentheses


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
        raise BudgetError("it computes with numbers of thousands of digits")


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
            raise BudgetError(f"it formats a value wider than {_WIDEST} characters, or to a width that is computed")
    size = budget.weigh(values)
    budget.charge_text(fields * (size + _WIDEST // 8))


# --- methods ----------------------------------------------------------------------------------------------------------

_PLAIN = [
    "capitalize",
    "casefold",
    "endswith",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "lower",
    "removeprefix",
    "removesuffix",
    "startswith",
    "swapcase",
    "title",
    "upper",
]
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
        raise SecurityError(f"the method {name!r:.40} of {type(owner).__name__!r} is not offered to templates")
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
    number = max((n for n in args if isinstance(n, int)), default=0)
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
    """The largest number or text length among some arguments."""
    sizes = [len(n) if isinstance(n, str) else n for n in numbers if isinstance(n, str | int | float)]
    return int(min(max(sizes, default=0), 1e15))


def _pad(budget: Budget, value: Any, size: int, args: tuple[Any, ...]) -> None:
    budget.charge_text(_width(*args))


def _per_line(budget: Budget, value: Any, size: int, args: tuple[Any, ...]) -> None:
    lines = len(value.splitlines()) if isinstance(value, str) else size
    budget.charge_text((1 + lines) * (1 + _width(*args)))


def _per_part(budget: Budget, value: Any, size: int, args: tuple[Any, ...]) -> None:
    budget.charge_text(8 * size + _count(value) * _width(*(arg for arg in args if isinstance(arg, str))))


def _squared(budget: Budget, value: Any, size: int, args: tuple[Any, ...]) -> None:
    budget.charge_text(size * (16 + size // 8) + 8 * _width(*args) * (1 + size))


def _sorted(budget: Budget, value: Any, size: int, args: tuple[Any, ...]) -> None:
    budget.charge_text(size * max(1, size.bit_length()))


def _groups(budget: Budget, value: Any, size: int, args: tuple[Any, ...]) -> None:
    budget.charge(_width(*args))


def _digits(budget: Budget, value: Any, size: int, args: tuple[Any, ...]) -> None:
    if any(isinstance(n, int | float) and abs(n) > 300 for n in args):
        raise BudgetError("it rounds to more than 300 digits")


def _replaces(budget: Budget, value: Any, size: int, args: tuple[Any, ...]) -> None:
    charge_replace(value if isinstance(value, str) else "", *args)


def _formats(budget: Budget, value: Any, size: int, args: tuple[Any, ...]) -> None:
    charge_percent(str(value), args)


def _nothing(budget: Budget, value: Any, size: int, args: tuple[Any, ...]) -> None:
    pass


def _count(value: Any) -> int:
    try:
        return len(value)
    except TypeError:
        return len(value.items) if isinstance(value, Once) else 1


_Cost = Callable[[Budget, Any, int, tuple[Any, ...]], None]

# Filters that pass elements on, or read few of them: charged by the number of elements, not their contents.
_SHALLOW = [
    "attr",
    "batch",
    "count",
    "d",
    "default",
    "first",
    "items",
    "last",
    "length",
    "list",
    "map",
    "random",
    "reject",
    "rejectattr",
    "reverse",
    "safe",
    "select",
    "selectattr",
    "slice",
]
_COSTS: dict[str, _Cost] = {
    **dict.fromkeys(_SHALLOW, _nothing),
    **dict.fromkeys(
        ["abs", "capitalize", "filesizeformat", "float", "int", "lower", "string", "title", "upper", "wordcount"],
        _nothing,
    ),
    **dict.fromkeys(("batch", "slice"), _groups),
    **dict.fromkeys(("center", "truncate"), _pad),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _sorted),
    **dict.fromkeys(("e", "escape", "forceescape", "join", "urlencode"), _per_part),
    **dict.fromkeys(("pprint", "striptags", "urlize", "wordwrap", "xmlattr"), _squared),
    "format": _formats,
    "indent": _per_line,
    "replace": _replaces,
    "round": _digits,
    "trim": _pad,
}


def charging_filters() -> dict[str, Callable[..., Any]]:
    """Jinja's filters, wrapped to charge before they run; the environment replaces `sum` and `tojson`."""
    return {name: _charging(name, FILTERS[name], cost) for name, cost in _COSTS.items()}


def _charging(name: str, function: Callable[..., Any], cost: _Cost) -> Callable[..., Any]:
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
        cost(budget, value, size, others)
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
    "eq",
    "equalto",
    "==",
    "ne",
    "!=",
    "lt",
    "lessthan",
    "<",
    "le",
    "<=",
    "gt",
    "greaterthan",
    ">",
    "ge",
    ">=",
    "in",
    "lower",
    "upper",
]


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
