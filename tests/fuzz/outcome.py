"""The verdict on one input: answered, refused in one printable line, or a fault."""

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minillm
from minillm.errors import MESSAGE_LENGTH, MinillmError

PACKAGE = str(Path(minillm.__file__).parent)


COUNTS: Counter[str] = Counter()
"""Calls of this process that were answered, and refused; input that is never answered tries little."""


class WrongError(Exception):
    """An input was answered, and the answer or what it left behind is wrong."""


class PlantedError(Exception):
    """Raised by functions that the fuzzer passes to the engine, which hands it on."""


def attempt(call: Callable[[], Any]) -> Any:
    """What a call returns, or None where it is refused in one printable line.

    Raises:
        WrongError: the refusal's message is not one.
        BaseException: whatever else the call raises.
    """
    try:
        answer = call()
    except MinillmError as error:
        check_message(error)
        COUNTS["refused"] += 1
        return None
    COUNTS["answered"] += 1
    return answer


def check_message(error: MinillmError) -> None:
    """Raise WrongError unless the message is one short line without control characters."""
    text = str(error)
    blemish = blemish_of(text)
    if blemish:
        raise WrongError(f"{type(error).__name__} {blemish}: {text[:300]!r}") from error


def blemish_of(text: str, longest: int = MESSAGE_LENGTH) -> str:
    """Why a text is not one short printable line; "" if it is."""
    if not text.strip():
        return "has no message"
    if len(text.splitlines()) > 1:
        return "has a message of several lines"
    if not text.isprintable():
        return "has a message with unprintable characters"
    return f"has a message of {len(text)} characters" if len(text) > longest else ""


def expect(condition: object, text: str) -> None:
    """Raise WrongError with the text unless the condition holds."""
    if not condition:
        raise WrongError(text)


def place_of(error: BaseException) -> str:
    """File and line of the package's innermost frame, of the refusal itself where its message is what is wrong."""
    if isinstance(error, WrongError) and error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(PACKAGE)]
    if not frames:
        return "outside minillm"
    return f"minillm{frames[-1].filename.removeprefix(PACKAGE)}:{frames[-1].lineno}"
