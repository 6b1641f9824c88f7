"""minillm strategies: the decoding strategies, and what other packages add."""

import argparse
from typing import Any

from .output import as_json
from .parser import Parser

DESCRIPTION = """List the decoding strategies with the field that selects each, and what other
packages add by their entry points: strategies (--strategy NAME), logits
processors (--logits-processor NAME), potentials (--potential NAME) and model
families (by their model_type)."""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..decoding.fields import FIELDS, MODELS
    from ..decoding.resolving import STRATEGIES
    from ..plugins import GROUPS, package_of, plugins

    own = {name: kind for name, (_, kind) in STRATEGIES.items() if name != "strategy"}
    added: dict[str, dict[str, dict[str, Any]]] = {
        group: {name: {"object": point.value, "package": package_of(point)} for name, point in plugins(group).items()}
        for group in GROUPS
    }
    if args.json:
        print(as_json({"strategies": own, "plugins": added}))
        return
    for name, kind in own.items():
        flag = f"--{name}" if name in MODELS else (FIELDS[name].flag or name)
        print(f"{flag:<32}  {kind}")
    for group, members in added.items():
        for name, about in members.items():
            print(f"{GROUPS[group]} {name:<24}  {about['object']} ({about['package']})")
    if not any(added.values()):
        print("no installed package adds a strategy, a logits processor, a potential or a model family")
