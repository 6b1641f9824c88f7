"""Flags of a command from a file and from the environment, read from the parser's own actions.

`--max-batch-size 8` may stand in a TOML file as `max-batch-size = 8`, with underscores too, and in the environment as
MINILLM_MAX_BATCH_SIZE=8. The command line counts before the environment, the environment before the file, and the file
before the default; a flag that may be repeated is replaced as a whole.
"""

import argparse
import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..errors import UsageError, shown

logger = logging.getLogger("minillm.cli")

PREFIX = "MINILLM_"
SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
"""How the environment says what a flag without a value says"""
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
"""Kubernetes sets MINILLM_PORT=tcp://10.0.0.1:8000 beside a service called minillm"""
CLOSE = 0.75
"""How alike a variable is to one that is read if it is taken for a misspelt one"""

Convert = Callable[[argparse.Action, list[str]], Any]
"""A parser's value of the words after a flag; raises `argparse.ArgumentError`"""


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add --config."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="take flags from a TOML file: port = 8080")


def flags(actions: Sequence[argparse.Action]) -> dict[str, argparse.Action]:
    """The flags of a parser that a file or the environment may set, by their names with underscores."""
    return {
        _name(max(action.option_strings, key=len).lstrip("-")): action
        for action in actions
        if action.option_strings and action.dest not in ("help", "config") and action.default is not argparse.SUPPRESS
    }


def settings(actions: Sequence[argparse.Action], words: Sequence[str], convert: Convert) -> dict[str, Any]:
    """Values from the environment and the file, by the `dest` of each flag.

    Args:
        actions: the parser's actions
        words: words of the command line, which may name the file
        convert: by the parser

    Raises:
        UsageError: the file cannot be read, has a key that is no flag, or a value is none of its flag.
    """
    known = flags(actions)
    values: dict[str, Any] = {}
    if path := _file_of(words):
        for key, value in _read(path).items():
            where = f"{path}: {_printed(key)}"
            if _name(key) not in known:
                raise UsageError(f"{where} is not a flag of this command: {_hint(_name(key), known)}")
            action = known[_name(key)]
            values[action.dest] = _converted(action, value, where, convert)
    for name, action in known.items():
        where = PREFIX + name.upper()
        text = os.environ.get(where, "")
        if text and not SERVICE_LINK.match(text):
            values[action.dest] = _converted(action, _from_environment(action, text, where), where, convert)
    _warn_of_misspelt(known)
    return values


def _warn_of_misspelt(known: Mapping[str, argparse.Action]) -> None:
    """One line for each environment variable that is nearly a flag's."""
    for variable in sorted(os.environ):
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and name not in known and (near := get_close_matches(name, known, 1, CLOSE)):
            logger.warning("%s is not read: did you mean %s?", variable, PREFIX + near[0].upper())


def repeats(action: argparse.Action) -> bool:
    """Whether a flag takes several values."""
    return isinstance(action, argparse._AppendAction) or action.nargs in ("+", "*")


def _printed(key: str) -> str:
    """A key of a file as it may stand in a message."""
    return shown(key) if not key.isprintable() or len(key) > 100 else key


def _file_of(words: Sequence[str]) -> Path | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", nargs="?")
    named = parser.parse_known_args([*words])[0].config or os.environ.get(f"{PREFIX}CONFIG")
    return Path(named) if named else None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} should be TOML: {error}") from None


def _from_environment(action: argparse.Action, text: str, where: str) -> object:
    """A value of the environment as a file would have it; several have commas between them."""
    if action.nargs == 0:
        if text.lower() not in SWITCH:
            raise UsageError(f"{where}: expected 1 or 0, found {shown(text)}")
        return SWITCH[text.lower()]
    return [word for word in map(str.strip, text.split(",")) if word] if repeats(action) else text


def _converted(action: argparse.Action, value: object, where: str, convert: Convert) -> Any:
    """A value of a file as the command line would give it."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: expected true or false, found {shown(value)}")
        return action.const if value else action.default
    if isinstance(value, dict) and repeats(action):  # NAME = "VALUE" below [model]
        value = [f"{name}={path}" for name, path in value.items()]
    values = value if isinstance(value, list) and repeats(action) else [value]
    if not values or not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in values):
        expected = "a text, or a list of them" if repeats(action) else "a text or a number"
        raise UsageError(f"{where}: expected {expected}, found {shown(value)}")
    words = [str(item) for item in values]
    try:
        if isinstance(action, argparse._AppendAction):
            return [convert(action, [word]) for word in words]
        return convert(action, words)
    except argparse.ArgumentError as error:
        raise UsageError(f"{where}: {error.message}") from None


def _name(key: str) -> str:
    return key.replace("-", "_")


def _hint(name: str, known: Mapping[str, object]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0].replace('_', '-')}?" if near else "--help lists them"
