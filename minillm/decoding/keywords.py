"""Keyword arguments of the engine's methods as typed dictionaries: editors complete them, mypy finds a misspelt one."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from ..text.chat.reasoning import Thoughts
from .fields import GenerationFields
from .hooks import Hook

Method = TypeVar("Method", bound=Callable[..., Any])


class RequestFields(GenerationFields, total=False):
    """Fields of a request: generation fields, its priority, its timeout and its hooks, as in `Engine.generate`."""

    priority: int
    timeout: float | None
    defaults: Mapping[str, Any] | None
    watch: Sequence[str] | None
    hooks: Mapping[str, Hook] | None
    thoughts: Thoughts | None
    inputs_embeds: Any


class ChatFields(RequestFields, total=False):
    """Fields of a conversation: a request's, and the arguments of `Engine.render_chat`."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


def default_of(hint: Any) -> Any:
    """The default of a keyword of this type: None if it may be None, else what its `Annotated` type carries, if any."""
    kind, *notes = get_args(hint) if get_origin(hint) is Annotated else [hint]
    return None if type(None) in get_args(kind) else notes[0] if notes else inspect.Parameter.empty


def with_fields(method: Method) -> Method:
    """Give a method that takes `**fields: Unpack[...]` a signature with each field, by which notebooks complete them.

    It is for those who ask at run time, IPython and `help`; type checkers read the annotation itself.
    """
    signature = inspect.signature(method)
    *own, fields = signature.parameters.values()
    [kind] = get_args(fields.annotation)
    method.__signature__ = signature.replace(parameters=[*own, *_parameters(kind)])  # type: ignore[attr-defined]
    return method


@cache
def _parameters(kind: type) -> list[inspect.Parameter]:
    """The keywords of a typed dictionary."""
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default_of(kind.__annotations__[name]), annotation=hint
        )
        for name, hint in get_type_hints(kind).items()
    ]
