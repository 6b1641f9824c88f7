"""Inputs with known ends, by which the harness itself is tested. The number of an input is its place in ENDS."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from minillm.errors import MESSAGE_LENGTH, MinillmError, ParameterError

from .outcome import attempt, expect


class PanicException(BaseException):
    """A panic of Rust is no Exception in Python."""


def prepare(folder: Path) -> Callable[[int, Random], None]:
    """What runs an input."""
    return lambda number, rng: ENDS[number][1]()


def _refuse(error: MinillmError) -> None:
    attempt(lambda: _raise(error))


class RawError(MinillmError):
    """An error whose message was not made printable."""

    def __init__(self, raw: str) -> None:
        super().__init__(raw)
        self.args = (raw,)


def _raise(error: BaseException) -> None:
    raise error


def _spin() -> None:
    while True:
        pass


ENDS: list[tuple[str, Callable[[], object]]] = [
    ("", lambda: None),
    ("", lambda: _refuse(ParameterError("expected this, found that"))),
    ("KeyError", lambda: {}["no such key"]),
    ("PanicException", lambda: _raise(PanicException("a panic"))),
    ("SystemExit", lambda: _raise(SystemExit(0))),
    ("", lambda: None),
    ("WrongError", lambda: _refuse(RawError("two\nlines"))),
    ("WrongError", lambda: _refuse(RawError("an escape \x1b[31m"))),
    ("WrongError", lambda: _refuse(RawError("long " * MESSAGE_LENGTH))),
    ("WrongError", lambda: _refuse(ParameterError(" "))),
    ("WrongError", lambda: expect(1 + 1 == 3, "a wrong result")),
    ("SIGSEGV", lambda: ctypes.string_at(0)),
    ("", lambda: None),
    ("SIGABRT", os.abort),
    ("exit", lambda: os._exit(0)),
    ("SIGKILL", lambda: os.kill(os.getpid(), signal.SIGKILL)),
    ("hang", _spin),
    ("hang", lambda: time.sleep(1000)),
    ("MemoryError", lambda: bytearray(10 << 30)),
    ("", lambda: None),
]
"""The kind of fault that the harness reports, "" for none, and what the input does."""
