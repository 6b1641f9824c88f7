"""The exercises: for each a function that takes a learner's answer and says what is wrong with it, or None.

It has the name of the function that the learner writes, in the module of its lesson.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np

Answer = Callable[..., Any]


def exercises() -> dict[str, Callable[[Answer], str | None]]:
    """Name of an exercise -> the function that looks at an answer."""
    modules = sorted(path.stem for path in Path(__file__).parent.glob("lesson_*.py"))
    named: dict[str, Callable[[Answer], str | None]] = {}
    for module in modules:
        contents = vars(import_module(f"{__name__}.{module}"))
        named |= {name: contents[name] for name in contents["EXERCISES"]}
    return named


def problem_of(answer: Answer, name: str = "") -> str | None:
    """Say what is wrong with an answer, in one sentence; None if it is right.

    An answer that raises is wrong, whatever it raises; so is one with other arguments, or a result of another form.
    `name` is the exercise's, by default the answer's own.
    """
    name = name or answer.__name__
    known = exercises()
    if name not in known:
        return f"There is no exercise {name}: expected one of {', '.join(known)}."
    try:
        return known[name](answer)
    except Exception as error:
        if extract_tb(error.__traceback__)[-1].filename.startswith(str(Path(__file__).parent)):
            return f"The exercise cannot use it: {error}."
        return f"It raises {type(error).__name__}: {error}"


def check(answer: Answer) -> None:
    """Print whether an answer is right, and if not, what is wrong."""
    problem = problem_of(answer)
    print(f"{answer.__name__}: right." if problem is None else f"{answer.__name__}: not yet. {problem}")


def compare(call: str, value: Any, expected: Any) -> str | None:
    """A sentence about a value that is not the expected one."""
    if value is None:
        return f"{call} returns None: write the function's body."
    value = plain(value)
    return None if value == plain(expected) else f"{call} should be {expected!r}, found {value!r}."


def plain(value: Any) -> Any:
    """A value with lists in place of arrays and tuples, and Python's numbers in place of NumPy's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
