"""Jinja configured for chat templates as in transformers, sandboxed and with a budget.

A template comes with the checkpoint and is untrusted. Jinja's immutable sandbox denies access to Python's internals and
changes to the template's variables. It bounds neither time nor memory: for that the parsed template is rewritten so
that each loop or macro body, comparison and list display is charged to the rendering's budget, and operators,
filters and calls are charged by their work (budget.py). Import this module only when a template is needed:
it imports Jinja.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, NoReturn, cast

from jinja2 import Template, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace, pass_context, pass_environment
from jinja2.visitor import NodeTransformer

from .budget import (
    CURRENT,
    BudgetError,
    budget_for,
    charge_format,
    charge_method,
    charge_operator,
    charged,
    charging_filters,
    charging_tests,
    weighed,
)

LONGEST = 2**16
"""Most characters of a template; the longest of published models have about 20,000"""
NESTING = 200
"""Maximum nesting of statements and expressions"""

_WEIGHED, _CHARGED = " weighed", " charged"  # filters that no template can name


class Refused(Exception):  # noqa: N818 - not an error of the template
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
    """`{% generation %}`: marks the assistant's words for training; here only its contents are rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block as its own scope."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


# --- what a template may call -----------------------------------------------------------------------------------------


def _raise_exception(message: Any) -> NoReturn:
    raise Refused(str(weighed(message)))


def _strftime_now(form: str) -> str:
    if len(form) > 100 or any(len(number) > 2 for number in "".join(c if c.isdigit() else " " for c in form).split()):
        raise BudgetError("strftime_now takes a format of at most 100 characters, with widths of at most two digits")
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict` as a function: the type itself would allow changes, as in `dict.update(message, ...)`."""
    return dict(weighed(args)[0] if args else (), **weighed(kwargs))


def _lipsum(*_: Any, **__: Any) -> NoReturn:
    raise SecurityError("lipsum is not available to chat templates")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` without the HTML escapes of Jinja's."""
    budget = CURRENT.get()
    size = budget.weigh(value)
    if indent is not None:
        budget.charge_text(size * (len(indent) if isinstance(indent, str) else max(0, indent)))
    if separators is not None:
        budget.charge_text(size * (1 + budget.weigh(separators) // 8))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _sum(environment: Any, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    """`sum` that charges each addition; Jinja's would concatenate lists without a limit."""
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    total = start
    for item in CURRENT.get().items(iterable):
        charge_operator("+", total, item)
        total = total + item
    return total


@dataclass(frozen=True)
class _Format:
    """The method `format` or `format_map` of a text."""

    text: str
    sandboxed: Any

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        charge_format(self.text, [args, kwargs])
        return str(self.sandboxed(*args, **kwargs)) if type(self.text) is str else self.sandboxed(*args, **kwargs)


@pass_context
def _finalize(_: Context, value: Any) -> Any:
    """Charge for a value about to be written. Taking the context stops Jinja from evaluating it while compiling."""
    CURRENT.get().weigh(value)
    return value


# --- the environment --------------------------------------------------------------------------------------------------

_FUNCTIONS = {
    "dict": _dict,
    "lipsum": _lipsum,
    "namespace": _Namespace,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
_DEEPER = (Macro, LoopContext, BlockReference)  # values that call back into the template
_CALLED = (Joiner, Undefined, _Format)


class _Environment(ImmutableSandboxedEnvironment):
    """Sandboxed environment that charges for operators, filters and calls at run time."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_finalize,
            optimized=False,  # it would evaluate constant expressions while compiling, outside any budget
        )
        self.filters.clear()
        self.filters.update(
            charging_filters() | {"sum": _sum, "tojson": _to_json, _WEIGHED: weighed, _CHARGED: charged}
        )
        self.tests.update(charging_tests())
        self.globals |= _FUNCTIONS
        self._functions = [*(value for value in self.globals.values() if isinstance(value, FunctionType | type))]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        charge_operator(operator, left, right)
        return self.binop_table[operator](left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, str | int):
            weighed(argument)  # a tuple is hashed
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not isinstance(obj, type)

    def wrap_str_format(self, value: Any) -> Any:
        sandboxed = super().wrap_str_format(value)
        return None if sandboxed is None else _Format(value.__self__, sandboxed)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja's
        budget = CURRENT.get()
        budget.charge(10)
        if isinstance(__obj, _DEEPER):
            if isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
                budget.weigh([args, kwargs])
            with budget.deeper():
                return super().call(__context, __obj, *args, **kwargs)
        if isinstance(__obj, BuiltinMethodType | MethodType):
            owner = __obj.__self__
            if not isinstance(owner, LoopContext | Cycler):
                args = charge_method(owner, __obj.__name__, args, kwargs)
        elif callable(__obj) and not isinstance(__obj, _CALLED) and __obj not in __self._functions:
            raise SecurityError(f"chat templates may not call a {type(__obj).__name__}")
        return super().call(__context, __obj, *args, **kwargs)


class _Charging(NodeTransformer):
    """Inserts charges for which Jinja has no hook into a parsed template."""

    def __init__(self) -> None:
        self.depth = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        if self.depth > NESTING:
            raise ValueError(f"it nests more than {NESTING} deep")
        bodies = {name: getattr(node, name) for name in ("body", "else_") if name in node.fields}
        costs = {name: _cost(body) for name, body in bodies.items()}  # before charges are inserted
        self.generic_visit(node, *args, **kwargs)
        for name, body in bodies.items():
            if body or name == "body":
                body.insert(0, nodes.ExprStmt(_wrapped(nodes.Const(costs[name]), _CHARGED)))
        self.depth -= 1
        change = _CHANGES.get(type(node))
        return node if change is None else change(node)


def _change_for(node: Any) -> nodes.Node:
    if node.test is not None:
        node.test = nodes.And(_wrapped(nodes.Const(_cost([node.test])), _CHARGED), node.test)
    return cast(nodes.Node, node)


def _change_compare(node: Any) -> nodes.Node:
    if not isinstance(node.expr, nodes.Const) or any(operand.op in ("in", "notin") for operand in node.ops):
        node.expr = _wrapped(node.expr)
        for operand in node.ops:
            operand.expr = _wrapped(operand.expr)
    return cast(nodes.Node, node)


def _change_concat(node: Any) -> nodes.Node:
    node.nodes = [_wrapped(part) for part in node.nodes]
    return cast(nodes.Node, node)


def _change_getitem(node: Any) -> nodes.Node:
    if isinstance(node.arg, nodes.Slice):
        node.node = _wrapped(node.node)
    return cast(nodes.Node, node)


def _change_literal(node: Any) -> nodes.Node:
    return _wrapped(node) if getattr(node, "ctx", "load") == "load" else node  # a tuple may be an assignment target


_CHANGES: dict[type[nodes.Node], Callable[[Any], nodes.Node]] = {
    nodes.For: _change_for,
    nodes.Compare: _change_compare,
    nodes.Concat: _change_concat,
    nodes.Getitem: _change_getitem,
    nodes.List: _change_literal,
    nodes.Tuple: _change_literal,
    nodes.Dict: _change_literal,
}


def _wrapped(node: nodes.Expr, name: str = _WEIGHED) -> nodes.Expr:
    """Wrap an expression so that its value is charged; constants are charged with the enclosing body."""
    if name == _WEIGHED and (isinstance(node, nodes.Const) or _is_flat(node)):
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _is_flat(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.List | nodes.Tuple) and all(isinstance(item, nodes.Const) for item in node.items)


def _cost(body: Iterable[nodes.Node]) -> int:
    """Steps of running the statements once, without nested bodies: one for each node and 64 literal characters."""
    steps = 1
    for node in body:
        if isinstance(node, nodes.TemplateData):
            steps += len(node.data) // 64
        steps += _cost(node.iter_child_nodes(exclude=("body", "else_")))
    return steps


@dataclass(frozen=True)
class Compiled:
    """A compiled template, and the names that its source uses."""

    template: Template
    variables: frozenset[str]
    """Names of its free variables"""
    names: frozenset[str]
    """Attribute names and string literals in it, among them the message keys that it reads"""

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render the template with these variables.

        Raises:
            Refused: the template refuses them.
            jinja2.exceptions.SecurityError: it does something forbidden, or exceeds its budget (`BudgetError`).
            Exception: it is a program, and may raise anything.
        """
        with budget_for(variables) as budget:
            pieces = []
            for piece in self.template.generate(variables):
                budget.write(len(piece))
                pieces.append(piece)
            return "".join(pieces)


def compile_template(source: str) -> Compiled:
    """Parse and compile a chat template.

    Raises:
        jinja2.TemplateSyntaxError: it is not valid Jinja.
        ValueError: it is too long or nests too deeply.
    """
    if len(source) > LONGEST:
        raise ValueError(f"it has {len(source)} characters, expected at most {LONGEST}")
    environment = _Environment()
    tree = environment.parse(source)
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    variables = meta.find_undeclared_variables(tree)
    charging = _Charging().visit(tree)
    return Compiled(environment.from_string(charging), frozenset(variables), frozenset(names))
