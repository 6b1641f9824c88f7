"""Coroutines that read a part of a call, one character at a time, as its text grows."""

import json
from collections.abc import Collection, Generator

SPACE = " \t\r\n"
PAIRS = {"{": "}", "[": "]"}

Scan = Generator[None, str, str]
"""Reads characters, the first as its argument; returns the first character that it has not used."""


class NotACallError(Exception):
    """The text at hand is not a call."""


def scan_space(c: str) -> Scan:
    """The first character that is not white space."""
    while c in SPACE:
        c = yield
    return c


def scan_string(c: str, strings: list[str], expected: Collection[str] | None = None) -> Scan:
    """A JSON string; its value is appended to `strings`. It is given up where it differs from all expected ones."""
    if c != '"':
        raise NotACallError
    text = c
    while (c := (yield)) != '"':
        text += c
        if c == "\\":
            text += yield
            expected = None  # written in another way
        elif expected is not None and not any(value.startswith(text[1:]) for value in expected):
            raise NotACallError
    try:
        strings.append(json.loads(f'{text}"', strict=False))
    except ValueError:
        raise NotACallError from None
    return (yield from scan_space((yield)))


def scan_one_of(c: str, *expected: str) -> Scan:
    """One of some texts, which is returned."""
    prefix = c
    while prefix not in expected:
        if not any(text.startswith(prefix) for text in expected):
            raise NotACallError
        prefix += yield
    return prefix


def scan_up_to(end: str) -> Scan:
    """A name in one line, up to the text that ends it, which is left out."""
    name = ""
    while not name.endswith(end):
        c = yield
        if c == "\n" or (c == "<" and not end.startswith("<")):
            raise NotACallError
        name += c
    return name.removesuffix(end)


def scan_value(c: str) -> Scan:
    """Any JSON value, read roughly."""
    depth = 0
    while depth or c not in ",}]":
        if c == '"':
            while (c := (yield)) != '"':
                if c == "\\":
                    yield
        depth += (c in PAIRS) - (c in "}]")
        c = yield
    return c
