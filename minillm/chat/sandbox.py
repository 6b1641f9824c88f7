"""Jinja as transformers sets it up for chat templates, kept from everything but text.

A template comes with the checkpoint, from a stranger. Jinja's immutable sandbox refuses Python's internals and changes
of what the template is given. Import this module only when a template is needed: it imports Jinja.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class Refused(Exception):  # noqa: N818 - it is no error of the template's
    """The template called `raise_exception`."""


class _Namespace(Namespace):
    """A namespace without private names: Jinja asks objects for some (`__call__`, `__html__`) outside the sandbox."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_private(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"access to attribute {name!r} of 'namespace' object is unsafe.")


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training; here the block is what is in it."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: Any) -> NoReturn:
    raise Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """The type itself would change what is given: `dict.update(message, ...)`."""
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@dataclass(frozen=True)
class Compiled:
    """A template that can be rendered, and what its source says of itself."""

    template: Template
    variables: frozenset[str]
    """What it takes from outside"""
    names: frozenset[str]
    """Attributes and texts that it spells out, among them the keys of messages that it reads"""


def compile_template(source: str) -> Compiled:
    """Parse and compile a chat template.

    Raises:
        jinja2.TemplateSyntaxError: it is not valid Jinja.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "dict": _dict,
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    tree = environment.parse(source)
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    variables = meta.find_undeclared_variables(tree)
    return Compiled(environment.from_string(source), frozenset(variables), frozenset(names))
