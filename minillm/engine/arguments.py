"""Readers of the engine's arguments, the table of those that are no options, and the refusal of another task."""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig, Output
from ..decoding.settings import GenerationConfig
from ..decoding.values import LARGE, Reader, T, flag, number, reader, whole
from ..errors import ParameterError, TaskError, shown

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer


@reader("the path of a folder or a hub id")
def path(value: object) -> str:
    """Paths and hub ids."""
    name = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(name, str) or not name:
        raise ValueError
    return str(name)


@reader("the path of a folder or a tokenizer.json, a hub id or a Tokenizer")
def tokenizer_or_path(value: object) -> "str | Tokenizer":
    """Tokenizers and where to find one."""
    from ..text.tokenizer import Tokenizer

    return value if isinstance(value, Tokenizer) else path(value)


@reader("a dict of names and folders or hub ids")
def named_paths(value: object) -> dict[str, str]:
    """Paths by name."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise ValueError
    return {name: path(where) for name, where in value.items()}


@reader("a GenerationConfig (of a dict: GenerationConfig.from_dict)")
def _config(value: object) -> GenerationConfig:
    if not isinstance(value, GenerationConfig):
        raise ValueError
    return value


@reader("a dict of generation fields")
def _defaults(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError
    return dict(value)


@reader("a dict of texts by name")
def _notes(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for pair in value.items() for text in pair):
        raise ValueError
    return dict(value)


def optional(read: Reader[T]) -> Reader[T | None]:
    """A reader that takes None too, which stands for the default."""
    return replace(read, read=lambda value: None if value is None else read.read(value))  # type: ignore[arg-type, return-value]


ARGUMENTS: dict[str, Reader[Any]] = {
    "model": optional(path),
    "seed": replace(whole(0, 2**64), expected="a whole number from 0 to 2**64 - 1"),
    "std": number(0, LARGE),
    "request_id": replace(whole(0), expected="a whole number as `add` returns it"),
    "priority": replace(whole(-math.inf), expected="a whole number; smaller ones come first"),
    "timeout": optional(replace(number(0, LARGE, above=True), expected="a number of seconds above 0")),
    "defaults": optional(_defaults),
    "max_waiting": whole(1),
    "max_unread": whole(1),
    "config": optional(_config),
    "progress": flag,
    "path": replace(path, expected="the path of a file"),
    "notes": optional(_notes),
}
"""Arguments of `Engine`, `Engine.random` and the engine's methods, beside the options. `decoding.prompts` reads
prompts."""


def read(name: str, value: object, reader: Reader[Any] | None = None) -> Any:
    """Validate an argument, and convert it to the type that the engine uses.

    Args:
        name: of the argument
        value: the user's
        reader: of an option; by default the table's

    Raises:
        ParameterError: the reader refuses the value.
    """
    reader = reader or ARGUMENTS[name]
    try:
        return reader(value)
    except ValueError:
        raise ParameterError(f"{name} should be {reader.expected}, found {shown(value)}") from None


def refuse_task(config: ModelConfig, output: Output, call: str) -> None:
    """Refuse a call that needs another kind of model.

    Args:
        config: the model's
        output: what the call needs
        call: its name

    Raises:
        TaskError: the model's head computes something else.
    """
    if config.output == output:
        return
    kind = f"{config.model_type} model"
    if config.output == "labels":
        has = f"this {kind} classifies texts: use classify"
    elif config.output == "token_labels":
        has = f"this {kind} labels tokens: use classify_tokens"
    elif config.output == "spans":
        has = f"this {kind} answers questions: use answer"
    elif config.output == "states":
        has = f"this {kind} has no head: it embeds texts, use embed"
    else:
        has = f"this {kind} generates text, and has no head of labels"
    raise TaskError(f"{call} needs {NEEDS[output]}; {has}")


NEEDS: Mapping[Output, str] = {
    "tokens": "a model that generates text",
    "labels": "a checkpoint for sequence classification",
    "token_labels": "a checkpoint for token classification",
    "spans": "a checkpoint for question answering",
}
"""Models that calls need, by the results of their heads"""
