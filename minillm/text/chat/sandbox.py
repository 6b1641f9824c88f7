"""Jinja configured for chat templates as in transformers, and the loop of the process that renders them.

A template comes with the checkpoint and is untrusted. Jinja's immutable sandbox denies access to Python's internals; it
bounds neither time nor memory. Therefore templates are rendered in a process of their own, which the system stops when
it exceeds its limits (`renderer.py`). That process imports this file alone, as a top-level module: no relative imports
here, and nothing beyond Jinja and the standard library.

A request is an object {"source": ..., "variables": {...}, "seconds": ...}, a line of JSON. The answer is one of

    {"text": ...}                                        what the template writes
    {"variables": [...], "names": [...]}                 to a request without variables: what the template uses
    {"error": <kind>, "message": ..., "line": ...}

Kinds of errors: "syntax", it is not valid Jinja; "refusal", it calls `raise_exception`; "security", it does what the
sandbox forbids; "limit", it nests too deeply, or uses too much memory or output; "failure", any other.
"""

import contextlib
import faulthandler
import json
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LONGEST = 2**16
"""Most characters of a template; the longest of published models have about 20,000"""
OUTPUT = 4_000_000
"""Most characters that a template may write, plus 16 for each character of the request"""
MEMORY = 2**30
"""Bytes of address space of the rendering process, where the system can limit it"""


class Refusal(Exception):  # noqa: N818 - not an error of the template
    """The template called `raise_exception`."""


class LimitError(Exception):
    """The template exceeds a limit."""


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
    """`{% generation %}`: marks the assistant's words for training; here only its contents are rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block as its own scope."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: Any) -> NoReturn:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` without the HTML escapes of Jinja's."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment


@lru_cache(maxsize=16)
def _compile(source: str) -> tuple[Template, dict[str, Any]]:
    """The compiled template, and its free variables and the attribute names and literals that it spells out."""
    if len(source) > LONGEST:
        raise ValueError(f"it has {len(source)} characters, expected at most {LONGEST}")
    environment = _environment()
    tree = environment.parse(source)
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    uses = {"variables": sorted(meta.find_undeclared_variables(tree)), "names": sorted(names)}
    return environment.from_string(source), uses


def _render(template: Template, variables: Mapping[str, Any], most: int) -> str:
    pieces = []
    for piece in template.generate(variables):
        most -= len(piece)
        if most < 0:
            raise LimitError("its output is far longer than the conversation")
        pieces.append(piece)
    return "".join(pieces)


def answer(request: Mapping[str, Any], characters: int) -> str:
    """The answer to a request, as JSON.

    Args:
        request: its source and variables
        characters: its length as JSON
    """
    stage = "syntax"
    try:
        template, uses = _compile(request["source"])
        stage = "failure"
        if "variables" not in request:
            return json.dumps(uses)
        return json.dumps({"text": _render(template, request["variables"], OUTPUT + 16 * characters)})
    except Exception as error:  # a template is a program and may raise anything
        kind, message = _explained(stage, error)
        return json.dumps({"error": kind, "message": message[:1000], "line": getattr(error, "lineno", None)})


def _explained(stage: str, error: Exception) -> tuple[str, str]:
    """Kind and message of an error."""
    if isinstance(error, RecursionError):
        return "limit", "endless recursion, or too deep nesting"
    if isinstance(error, MemoryError):
        return "limit", f"it needs more than {MEMORY >> 20:,} MiB of memory"
    kinds = {Refusal: "refusal", SecurityError: "security", LimitError: "limit"}
    kind = next((kind for cause, kind in kinds.items() if isinstance(error, cause)), stage)
    return kind, str(error) or type(error).__name__


def serve() -> None:
    """Answer requests from standard input until it ends, within the limits of the process.

    A timer that needs no interpreter lock ends the process with status 1 when a request takes longer than its seconds.
    """
    with contextlib.suppress(ImportError):  # Windows has no such limits
        import resource

        for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
            with contextlib.suppress(OSError, ValueError):  # macOS limits no memory
                resource.setrlimit(limit, (most, most))
    print(flush=True)  # ready
    for line in sys.stdin:
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["seconds"], exit=True)
        reply = answer(request, len(line))
        faulthandler.cancel_dump_traceback_later()
        print(reply, flush=True)
