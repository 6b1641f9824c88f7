"""The command line's parser, and its handling of errors, Ctrl-C and closed pipes."""

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import FollowedError, MinillmError, printable
from ..progress_bar import vanishing
from . import logs
from .options import has_ranks
from .parser import Parser

COMMANDS = {
    "generate": "continue a prompt",
    "chat": "chat with the model, turn by turn",
    "serve": "serve models over HTTP, with OpenAI's API",
    "batch": "run a file of requests",
    "compare": "one prompt under 13 decoding strategies",
    "translate": "translate texts",
    "summarize": "summarize texts",
    "transcribe": "write down what is said in WAV files",
    "classify": "label texts",
    "embed": "texts as vectors",
    "strategies": "decoding strategies, and what other packages add",
    "source": "where a term of the glossary is implemented",
    "inspect": "what the model would say at each position",
    "tokenize": "show the tokens of a text",
    "shapes": "the operations of one forward pass, their shapes and costs",
    "perplexity": "what each dtype costs in accuracy",
    "pull": "fetch a model from the hub into the local cache",
    "models": "the models on this machine, and how fast they run",
    "quantize": "write a checkpoint with smaller weights",
    "analyze": "FLOPs, bytes and memory of a model, from its config.json alone",
    "profile": "where the time of a run goes",
    "bench": "list and run the benchmarks",
    "course": "lessons on the engine, in Jupyter or as text",
}
"""Command, the module of this package that has its options and runs it -> its help; only that module is imported"""
INTERRUPTED = 130  # a shell's exit code for SIGINT
CLOSED_PIPE = 141  # a shell's exit code for SIGPIPE

WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


def build_parser(command: str | None = None) -> Parser:
    """The parser of all commands; if `command` is given, the others have a name and no options."""
    parser = Parser(
        prog="minillm",
        description="Run a transformer language model, and look inside it while it runs.",
        epilog="minillm COMMAND --help explains a command. The model in the package runs at once: "
        'minillm generate "A list of colors: red,"',
    )
    parser.add_argument("--version", action="version", version=f"minillm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, words in COMMANDS.items():
        if command not in (None, name):
            commands.add_parser(name, help=words)
            continue
        module = import_module(f"{__package__}.{name}")
        about = {"description": module.DESCRIPTION, "epilog": getattr(module, "EPILOG", None)}
        subparser = commands.add_parser(name, help=words, **about)
        module.add_options(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 1 (failure), 2 (usage), 130 (Ctrl-C), 141 (closed pipe)."""
    logs.begin()
    if sys.stdout is None:
        return _fail("standard output is closed: there is nowhere to print to")
    args = argparse.Namespace()
    try:
        try:
            words = sys.argv[1:] if arguments is None else arguments
            parser = build_parser(words[0] if words else "")
            if not words:
                parser.print_help(sys.stdout)
                return 0
            if words[0].startswith("-") and words[0] not in parser._option_string_actions:
                parser.error(f"{words[0]}: a command comes first, as in: minillm generate {words[0]} ...")
            args = parser.parse_args(words)
            with vanishing():
                args.run(args)
        finally:
            sys.stdout.flush()  # also after --help, which raises SystemExit
        return 0
    except FollowedError as error:
        return error.exit_code  # rank 0 says it
    except MinillmError as error:
        code = _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        code = CLOSED_PIPE
    except OSError as error:
        code = _fail(_explain(error))
    if has_ranks(args) and "mpi4py.MPI" in sys.modules:  # else this rank ends before it has joined the others
        from ..distributed.mpi import world

        world().end(code)  # others may wait for this rank
    return code


def _fail(message: str, code: int = 1) -> int:
    """Print an error on standard error, if possible. Returns the exit code."""
    with contextlib.suppress(OSError):
        print(logs.failure(printable(message)), file=sys.stderr, flush=True)
    return code


def _explain(error: OSError) -> str:
    """The message of an OSError; one of writing without a file name concerns standard output."""
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {reason}"
    if error.errno not in WRITE_ERRORS:
        return reason
    _drop_output()
    return f"standard output cannot be written: {reason}"


def _drop_output() -> None:
    """Discard buffered output, or Python reports the error again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
