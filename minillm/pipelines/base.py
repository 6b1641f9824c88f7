"""A pipeline: a model and its task."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from ..decoding.foreign import PIPELINE, WORDS
from ..engine.engine import Engine
from ..errors import ParameterError, listed, shown


class Pipeline:
    """A model and its task. Call it with a text, or a list of texts, whose results come in the same order.

    A list that takes long shows a bar on a terminal or in a notebook, unless `progress=False`. `close()` or a `with`
    block closes the engine.
    """

    OPTIONS: ClassVar[frozenset[str]] = frozenset()
    """Arguments of a call"""

    def __init__(self, task: str, engine: Engine, **options: Any) -> None:
        """Use `pipeline` instead."""
        self.task, self.engine, self.options = task, engine, options

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Whether an engine's model has what the task needs."""
        raise NotImplementedError

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Refuse what is no argument of a call.

        Raises:
            ParameterError: one is unknown; the message says what to do.
        """
        for name in options:
            if name in WORDS[PIPELINE] and name not in cls.OPTIONS:
                raise ParameterError(f"{name} is not offered: {WORDS[PIPELINE][name].advice}")
            if not cls.takes(name):
                near = get_close_matches(name, cls.OPTIONS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"expected one of {listed(sorted(cls.OPTIONS))}"
                raise ParameterError(f"there is no argument {shown(name)} of this task: {hint}")

    @classmethod
    def takes(cls, name: str) -> bool:
        """Whether a call has an argument of this name."""
        return name in cls.OPTIONS

    def __call__(self, inputs: Any, *, progress: bool = True, **options: Any) -> Any:
        """Run the task; the classes say what of.

        Raises:
            ParameterError: an option is unknown or impossible.
            PromptError: an input is not text, or too long.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}(task={self.task!r}, model={self.engine.name!r})"

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
