"""What rendering a chat template may cost: steps, nesting and time.

A step is about what Python does in a microsecond: a node of the template that is evaluated, an element of a list that
is visited, or 64 characters of text that are read or written. Every operation is charged before it is carried out, so
none is ever larger than what is left: neither time nor memory can run away. The budget grows with the conversation.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

STEPS = 300_000
"""For any conversation, however short. Templates of published models take some 100 for a message."""
STEPS_PER_VALUE = 2_000
"""For each text, number, list or object of the conversation; and a step for each character."""
SECONDS = 20.0
"""For any conversation; and 1 for each million steps beyond `STEPS`"""
DEPTH = 100
"""Lists in lists, and macros and recursive loops that call each other"""
_LOG_CHARACTERS = 6  # 64 in a step
OUTPUT = 4_000_000
"""Characters that any conversation may become; and 16 for each of its own, and 1,000 for each of its values"""


class BudgetError(SecurityError):
    """A template goes on for too long, or nests too deeply."""


class Once(Iterator[Any]):
    """An iterator over what a filter yields: Jinja's generators would hold each other, as deep as a template likes."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.at = 0

    def __next__(self) -> Any:
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]


class Budget:
    """What is left of one rendering."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        """Measure the conversation and the other variables, which decide how much a template may do."""
        values, characters = _size(variables)
        self.steps = self.total = STEPS + STEPS_PER_VALUE * values + characters
        self.output = OUTPUT + 1000 * values + 16 * characters
        self.depth = 0
        self.deadline = monotonic() + SECONDS + (self.total - STEPS) / 1e6
        self._next_look = self.steps

    def charge(self, steps: int) -> None:
        """Take steps off what is left.

        Raises:
            BudgetError: it is not enough, or time is over.
        """
        self.steps -= steps
        if self.steps >= self._next_look:
            return
        if self.steps < 0:
            raise BudgetError(f"it would take more than {self.total:,} steps or {64 * self.total:,} characters")
        if monotonic() > self.deadline:
            raise BudgetError("it takes too long")
        self._next_look = max(0, self.steps - 1000)

    def charge_text(self, characters: int) -> None:
        """The steps of reading or writing so many characters."""
        self.charge(1 + (characters >> _LOG_CHARACTERS))

    def write(self, characters: int) -> None:
        """Take off what the rendering may become.

        Raises:
            BudgetError: it is longer.
        """
        self.output -= characters
        if self.output < 0:
            raise BudgetError("it writes far more text than the conversation has")

    def weigh(self, value: Any) -> int:
        """Charge for all of a value, as often as it holds what it holds, and return how many characters that is.

        Raises:
            BudgetError: it is too much, or nested too deeply.
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
        """The elements of anything, charged one by one."""
        found = []
        for value in values:
            self.charge(1)
            found.append(value)
        return found

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """A call within a call.

        Raises:
            BudgetError: there are too many.
        """
        if self.depth == DEPTH:
            raise BudgetError(f"endless recursion: it calls itself more than {DEPTH} times deep")
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


CURRENT: ContextVar[Budget] = ContextVar("minillm_chat_budget")
"""Of the rendering that runs"""


@contextmanager
def budget_for(variables: Mapping[str, Any]) -> Iterator[Budget]:
    """A new budget, the current one until the rendering is over."""
    token = CURRENT.set(Budget(variables))
    try:
        yield CURRENT.get()
    finally:
        CURRENT.reset(token)


def _inside(value: Any) -> Iterable[Any] | None:
    """What a container holds; None for what holds nothing."""
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
    """How many values there are in plain ones, and characters in them."""
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
