"""Python values that no argument expects."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from .mutate import FLOATS, TEXTS, WHOLE
from .outcome import PlantedError


class BadRepr:
    """It cannot even be shown."""

    def __repr__(self) -> str:
        raise PlantedError("no repr")


class LongRepr:
    """It is shown in many lines, with escapes."""

    def __repr__(self) -> str:
        return "\x1b[31m\n" * 1000


class Fraction(float):
    """A subclass of float."""


class Text(str):
    """A subclass of str."""

    __slots__ = ()


def _itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


OBJECTS: list[Callable[[], Any]] = [
    *(
        object,
        BadRepr,
        LongRepr,
        _itself,
        lambda: Fraction(0.5),
        lambda: Text("a"),
        lambda: b"bytes",
        lambda: bytearray(3),
    ),
    *(lambda: {1, 2}, lambda: frozenset({3}), lambda: range(3, 6), lambda: range(10**12), lambda: (i for i in [3, 4])),
    *(lambda: {3: 4}, lambda: {"a": {"b": []}}, lambda: 1j, lambda: print, lambda: int, lambda: slice(3), lambda: ...),
    *(
        lambda: np.int64(5),
        lambda: np.float32(0.5),
        lambda: np.float64("nan"),
        lambda: np.array([3, 4]),
        lambda: np.array(3),
    ),
    *(lambda: np.array([[3, 4], [5, 6]]), lambda: np.array(["a"]), lambda: np.array([3.0]), lambda: np.array([])),
    *(lambda: np.bool_(True), lambda: np.str_("a"), lambda: memoryview(b"abc"), lambda: Path("a"), lambda: Path("\0")),
    *(lambda: np.array([3, None]), lambda: np.zeros((0, 3), int), lambda: np.uint64(2**64 - 1), lambda: 10**5000),
    *(lambda: [3, 4, 5], lambda: ["red", "green"], lambda: [[3, 4], "red"], lambda: [3, "a"], lambda: [10**30]),
    *(
        lambda: [True],
        lambda: [3.0],
        lambda: [[3], [[4]]],
        lambda: [3] * 70,
        lambda: [-1],
        lambda: [511],
        lambda: [512],
    ),
    *(
        lambda: (3, 4),
        lambda: [([3, 4], 2.0)],
        lambda: [[[3, 4], float("nan")]],
        lambda: {(3, 4): -2.0},
        lambda: [2, 1.5],
    ),
]


def odd(rng: Random, depth: int = 0) -> Any:
    """Any value."""
    match rng.randrange(7 if depth < 2 else 5):
        case 0 | 1:
            return rng.choice(WHOLE)
        case 2:
            return rng.choice(FLOATS)
        case 3:
            return rng.choice([*TEXTS, None, True, False])
        case 4:
            return rng.choice(OBJECTS)()
        case 5:
            return [odd(rng, depth + 1) for _ in range(rng.randrange(4))]
        case _:
            return {rng.choice(TEXTS): odd(rng, depth + 1) for _ in range(rng.randrange(3))}
