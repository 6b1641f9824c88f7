"""Resource limits for rendering a chat template: steps, nesting, output size and time.

A step takes about a microsecond in Python: evaluating a node of the template, visiting a list element, or reading or
writing 64 characters of text. Every operation is charged before it runs, so none can exceed the remaining budget, and
both time and memory are bounded. The budget grows with the conversation.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

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
        """Subtract steps from the budget.

        Raises:
            BudgetError: the steps or the time are used up.
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
        """Charge for reading or writing `characters` characters."""
        self.charge(1 + (characters >> _LOG_CHARACTERS))

    def write(self, characters: int) -> None:
        """Subtract from the remaining output.

        Raises:
            BudgetError: the output is too long.
        """
        self.output -= characters
        if self.output < 0:
            raise BudgetError("it writes far more text than the conversation has")

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
