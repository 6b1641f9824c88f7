"""The parser of all sub-commands, and what becomes of errors, Ctrl-C and closed pipes."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import MinillmError
from . import analyze, bench, chat, compare, generate, inspect, perplexity, profile, quantize, tokenize

COMMANDS = (generate, chat, compare, inspect, tokenize, perplexity, quantize, analyze, profile, bench)
INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended
CLOSED_PIPE = 141  # likewise for a pipe whose reader went away


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="minillm", description="Run a transformer language model, and look inside it while it runs."
    )
    parser.add_argument("--version", action="version", version=f"minillm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 1 (failure), 2 (usage), 130 (Ctrl-C), 141 (closed pipe)."""
    args = build_parser().parse_args(arguments)
    logging.basicConfig(format="minillm: %(message)s", level=logging.WARNING)
    logging.getLogger("minillm.kernels").setLevel(logging.INFO)  # compiling takes a while, once: show how far it is
    try:
        args.run(args)
        sys.stdout.flush()
    except MinillmError as error:
        print(f"minillm: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at exit
        return CLOSED_PIPE
    return 0
