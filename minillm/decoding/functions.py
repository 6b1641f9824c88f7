"""Functions of the user's own among a request's settings: logits processors and stopping criteria.

A logits processor is a function (history, logits, xp), or one of transformers' form, (input_ids [N, T], scores [N, V]).
Stopping criteria have transformers' form: (input_ids [1, T], scores), where scores is None, as it is there unless
`output_scores` is set. Functions of this form get torch tensors where torch has been imported, as whoever computes with
it has, and NumPy arrays elsewhere; they may return either.
"""

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MinillmError, NumericalError, ParameterError, holdable, shown
from ..plugins import failure
from .field_values import ByIdentity
from .history import History


@dataclass(frozen=True)
class UserProcessor:
    """A user's processor with checks of its return value."""

    function: ByIdentity

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        if self.function.arguments != 2:
            return self._checked(called(self.function, history, logits, xp), logits)
        lengths = history.lengths
        if (lengths == lengths[0]).all():
            return self._theirs(history.lines, logits)
        for length in np.unique(lengths):  # a tensor has rows of one length
            rows = np.flatnonzero(lengths == length).tolist()
            logits[rows] = self._theirs([history.lines[row] for row in rows], logits[rows])
        return logits

    def _theirs(self, lines: Sequence[NDArray[np.int64]], logits: NDArray[Any]) -> NDArray[Any]:
        """The result of a function of transformers' form. N lines of T tokens, [N, V] -> [N, V]"""
        result = called(self.function, _given(np.stack(lines)), _given(logits))
        return self._checked(_as_array(result), logits)

    def _checked(self, result: Any, logits: NDArray[Any]) -> NDArray[Any]:
        shape = getattr(result, "shape", None)
        if shape != logits.shape or result.dtype.kind != "f":
            actual = type(result).__name__ if shape is None else f"{result.dtype} {list(shape)}"
            raise ParameterError(
                f"logits_processor {self.function.function!r} should return scores, float32 {list(logits.shape)},"
                f" found {actual}"
            )
        scores: NDArray[Any] = result.astype(np.float32, copy=False)
        if not (scores < np.inf).all():
            raise NumericalError(f"logits_processor {self.function.function!r} returned NaN or infinity")
        return scores


@dataclass(frozen=True)
class StoppingCriteria:
    """A user's criteria for one text: each is asked after each token."""

    functions: tuple[ByIdentity, ...]
    prompt_ids: Sequence[int]

    def __call__(self, token_ids: Sequence[int]) -> str | None:
        """The name of the first criterion that ends the text here, prompt and generated tokens; None: it goes on.

        Raises:
            ParameterError: a criterion returned something else than a bool, or one bool in a tensor or array.
        """
        names = []
        for function in self.functions:
            ids = np.asarray([[*self.prompt_ids, *token_ids]], np.int64)  # [1, T]
            answer = called(function, _given(ids), None)
            if self._ends(function, answer):
                names.append(getattr(function.function, "__name__", type(function.function).__name__))
        return names[0] if names else None

    def _ends(self, function: ByIdentity, answer: object) -> bool:
        try:
            array = np.asarray(_as_array(answer))
        except (TypeError, ValueError):
            array = np.empty(0)
        if array.dtype.kind != "b" or array.size != 1:
            raise ParameterError(
                f"stopping_criteria {function.function!r} should return True or False, or one of them in a tensor or "
                f"array, found {shown(answer)}"
            )
        return bool(array.all())


def called(function: Any, *arguments: Any) -> Any:
    """A user's function called; what would end a stream without a word, or the thread of an engine, is its error.

    Raises:
        PluginError: the function is of another package, and raised an error that is none of minillm's.
        Exception: the function's own.
    """
    try:
        return function(*arguments)
    except BaseException as error:
        plugin = function.plugin if isinstance(function, ByIdentity) else ""
        if plugin and isinstance(error, Exception) and not isinstance(error, MinillmError):
            raise failure(plugin, error) from error
        if isinstance(error, StopIteration | StopAsyncIteration):
            raise holdable(error) from error
        if isinstance(error, Exception) or threading.current_thread() is threading.main_thread():
            raise
        raise RuntimeError(f"a function raised {type(error).__name__}") from error


def _given(array: NDArray[Any]) -> Any:
    """An array as a function of transformers' form takes it; a tensor shares its memory."""
    make = getattr(sys.modules.get("torch"), "from_numpy", None)
    return array if make is None else make(array)


def _as_array(result: Any) -> Any:
    """A tensor of torch as an array; anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(result, torch.Tensor):
        return result
    tensor = result.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()  # NumPy has no bfloat16
