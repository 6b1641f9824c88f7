"""Table of the engine's arguments and their allowed values."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..config import ModelConfig
from ..decoding.settings import GenerationConfig
from ..decoding.values import LARGE, flag, number, text, whole
from ..errors import ParameterError, TaskError, shown
from ..text.tokenizer import Tokenizer


class Argument(NamedTuple):
    """Validation rule of one argument."""

    read: Callable[[object], Any]
    """Converts the value to the type that the engine uses; raises ValueError for anything else"""
    expected: str
    optional: bool = False
    """True if None stands for the default"""


def _path(value: object) -> str:
    name = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(name, str) or not name:
        raise ValueError
    return str(name)


def _config(value: object) -> GenerationConfig:
    if not isinstance(value, GenerationConfig):
        raise ValueError
    return value


def _adapters(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise ValueError
    return {name: _path(where) for name, where in value.items()}


def _defaults(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError
    return dict(value)


_POSITIVE = "a whole number of at least 1"
_MODEL = "the path of a folder or a hub id"

ARGUMENTS = {
    "model": Argument(_path, _MODEL, optional=True),
    "revision": Argument(text, "a branch, tag or commit as text", optional=True),
    "tokenizer": Argument(
        lambda value: value if isinstance(value, Tokenizer) else _path(value),
        "the path of a folder or a tokenizer.json, a hub id or a Tokenizer",
        optional=True,
    ),
    "adapter": Argument(_path, _MODEL, optional=True),
    "adapters": Argument(_adapters, "a dict of names and folders or hub ids", optional=True),
    "draft": Argument(_path, _MODEL, optional=True),
    "amateur": Argument(_path, _MODEL, optional=True),
    "threads": Argument(whole(1), _POSITIVE, optional=True),
    "max_batch_size": Argument(whole(1), _POSITIVE),
    "max_batched_tokens": Argument(whole(1), _POSITIVE, optional=True),
    "cache_bytes": Argument(whole(1), _POSITIVE, optional=True),
    "prefix_cache": Argument(flag, "True or False"),
    "progress": Argument(flag, "True or False"),
    "seed": Argument(whole(0, 2**64), "a whole number from 0 to 2**64 - 1"),
    "std": Argument(number(0, LARGE), f"a number from 0 to {LARGE:g}"),
    "request_id": Argument(whole(0), "a whole number as `add` returns it"),
    "priority": Argument(whole(-math.inf), "a whole number; smaller ones come first"),
    "timeout": Argument(number(0, LARGE, above=True), "a number of seconds above 0", optional=True),
    "defaults": Argument(_defaults, "a dict of generation fields", optional=True),
    "max_waiting": Argument(whole(1), _POSITIVE),
    "max_unread": Argument(whole(1), _POSITIVE),
    "config": Argument(_config, "a GenerationConfig (of a dict: GenerationConfig.from_dict)", optional=True),
}
"""Arguments of `Engine`, `Engine.random` and the engine's methods. `decoding.prompts` reads prompts, `choose_backend`
the words of `Placement`."""


def read(name: str, value: object) -> Any:
    """Validate an argument and convert it to the type that the engine uses.

    Raises:
        ParameterError: it does not match the table.
    """
    argument = ARGUMENTS[name]
    if value is None and argument.optional:
        return None
    try:
        return argument.read(value)
    except ValueError:
        raise ParameterError(f"{name} should be {argument.expected}, found {shown(value)}") from None


def read_budget(max_batched_tokens: object, max_batch_size: int) -> int | None:
    """Validate `max_batched_tokens`, which must cover a decode step of all sequences.

    Raises:
        ParameterError: it is no count, or less than `max_batch_size`.
    """
    budget: int | None = read("max_batched_tokens", max_batched_tokens)
    if budget is not None and budget < max_batch_size:
        raise ParameterError(
            f"max_batched_tokens should be at least max_batch_size, which is {max_batch_size}, found {budget}: each "
            "decoding sequence takes a token of every step"
        )
    return budget


def refuse_task(config: ModelConfig, output: str, call: str) -> None:
    """Refuse a call that needs another kind of model.

    Args:
        config: the model's
        output: what the call needs, "tokens" or "labels"
        call: its name

    Raises:
        TaskError: the model's head computes something else.
    """
    if config.output == output:
        return
    kind = f"{config.model_type} model"
    if config.output == "labels":
        has = f"this {kind} classifies texts: use classify"
    elif config.output == "states":
        has = f"this {kind} has no head: it embeds texts, use embed"
    else:
        has = f"this {kind} generates text, and has no head of labels"
    needs = "a model that generates text" if output == "tokens" else "a checkpoint for sequence classification"
    raise TaskError(f"{call} needs {needs}; {has}")
