"""The parser of a command: a short and a full help, advice about what is misspelt, flags from a file."""

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from ..decoding.fields import FIELDS
from ..decoding.foreign import COMMANDS as OTHER_COMMANDS
from ..decoding.foreign import PYTHON, renamed
from ..errors import listed, printable, shown
from . import configuration

NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}
"""Types of arguments, in words"""


class Parser(argparse.ArgumentParser):
    """A parser with a short and a full help, which raises if help cannot be printed."""

    _common: frozenset[str] = frozenset()
    _configured = False
    _passes_on = False

    def __init__(self, **options: Any) -> None:
        if "\n" in f"{options.get('description')}{options.get('epilog')}":  # keep their lines
            options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print a message, which may quote any argument, and then a line of usage, and exit."""
        self.exit(2, f"{self.prog}: {printable(message)}\nusage: {self._brief_usage()}\n")

    def _brief_usage(self) -> str:
        """The usage in a line: the options that are required, and the places."""
        words = [self.prog, "[options]"]
        for action in self._actions:
            if action.help is argparse.SUPPRESS:
                continue
            name = str(action.metavar or action.dest.upper())
            if action.option_strings:
                words += [action.option_strings[0], name] if action.required else []
            else:
                words.append({"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(action.nargs), name))
        return " ".join(words)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; what this parser does not know is an error of its own, which suggests an option."""
        if self._passes_on:
            args = list(args or ())
            end = args.index("--") if "--" in args else len(args)
            self.set_defaults(passed_on=args[end + 1 :])
            args = args[:end]
        configured = configuration.settings(self._actions, args or (), self._get_values) if self._configured else {}
        lists = {}
        for action in self._actions:
            if action.dest in configured and configuration.repeats(action):
                lists[action.dest] = configured[action.dest]  # the command line replaces it, and does not add to it
            elif action.dest in configured:
                action.default = configured[action.dest]
        parsed, unknown = super().parse_known_args(args, namespace)
        for name, value in lists.items():
            if getattr(parsed, name) is None:
                setattr(parsed, name, value)
        if unknown:
            word = unknown[0].partition("=")[0]
            self.error(f"{word} is not an argument of this command: {self._hint(word)}")
        return parsed, unknown

    def _hint(self, word: str) -> str:
        """Advice about a word that is no argument."""
        near = []
        if word.startswith("-"):
            names = {name.lstrip("-"): name for name in self._option_string_actions}  # dashes are alike in all
            begun = [name for name in names if name.startswith(word.lstrip("-"))]
            near = (begun if word.startswith("--") else []) or get_close_matches(word.lstrip("-"), names, n=1)
            field = word.lstrip("-").replace("-", "_")
            setting = FIELDS.get(renamed(PYTHON).get(field, field))
            flag = "" if setting is None or setting.flag is None else setting.flag.partition(" ")[0]
            near = [flag] if flag in self._option_string_actions else [names[name] for name in near]
        elif any(action.dest == "text" for action in self._get_positional_actions()):
            return "put a text of several words in quotes"
        return f"did you mean {near[0]}?" if near else "--help lists the options"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            near = get_close_matches(str(value), list(action.choices), n=1)
            if isinstance(action, argparse._SubParsersAction) and value in renamed(OTHER_COMMANDS):
                near = [renamed(OTHER_COMMANDS)[value]]
            hint = f"did you mean {near[0]}?" if near else f"expected one of {listed(action.choices, 300)}"
            raise argparse.ArgumentError(None, f"{shown(value)}: {hint}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        expected = NUMBERS.get(action.type)
        if expected is None:
            return super()._get_value(action, arg_string)
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            raise argparse.ArgumentError(action, f"expected {expected}, found {shown(arg_string)}") from None

    def pass_on(self) -> None:
        """Keep the arguments after "--" as `passed_on`: they are another program's."""
        self._passes_on = True

    def take_configuration(self) -> None:
        """Add --config, and take the flags that the command line leaves out from its file and from the environment."""
        self._configured = True
        configuration.add_config_option(self)

    def shorten(self, common: frozenset[str]) -> None:
        """Make --help show only these options, by `dest`, and add --help-all."""
        self._common = common
        self.usage = self._brief_usage()
        self.add_argument("--help-all", action=_HelpAll, help="show every option and exit")

    def format_help(self) -> str:
        """The help; the short one if `shorten` was called."""
        if not self._common:
            return super().format_help()
        rare = [action for action in self._actions if action.dest not in self._common]
        groups, texts = self._action_groups, [action.help for action in rare]
        shown = [g for g in groups if any(action.dest in self._common for action in g._group_actions)]
        try:
            self._action_groups = shown
            for action in rare:
                action.help = argparse.SUPPRESS
            return super().format_help()
        finally:
            self._action_groups = groups
            for action, text in zip(rare, texts, strict=True):
                action.help = text

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file or sys.stderr)


class _HelpAll(argparse.Action):
    """Prints the full help."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)
        self.dest = dest

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the full help and exit."""
        assert isinstance(parser, Parser)
        parser._common = frozenset()
        parser.print_help()
        parser.exit()
