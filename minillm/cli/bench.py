"""minillm bench: list the benchmarks of a checkout, and run them."""

import argparse
import ast
import subprocess
import sys
from pathlib import Path

from ..errors import MinillmError, UsageError
from ..output_files import undone_by_signals
from .output import flow, terminal_width
from .parser import Parser

FOLDER = Path(__file__).parents[2] / "benchmarks"
if not FOLDER.is_dir():
    FOLDER = Path(__file__).parents[1] / "benchmarks"  # an installation has some of them
DESCRIPTION = """List the benchmarks, one script for each question, or run those that are named.

They are the scripts of the folder benchmarks/, of which an installation has
naive_vs_cached and a checkout all. Each prints what it measured, with the
machine and the commit, and most write it to benchmarks/results/, or results/.
Options after the names go to each script."""

EPILOG = """examples:
  minillm bench
  minillm bench naive_vs_cached --shape opt-350m
  minillm bench naive_vs_cached --help
  minillm bench all
"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    parser.usage = "%(prog)s [-h] [NAME ... | all] [OPTION OF THE SCRIPT ...]"
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; without a name they are listed")
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    questions = find(FOLDER)
    names = list(questions) if args.names == ["all"] else args.names
    if unknown := [name for name in names if name not in questions]:
        raise UsageError(f"benchmark {unknown[0]!r} is not known: expected {', '.join(questions)}, or all")
    if not names:
        width = max(map(len, questions)) + 2
        for name, question in questions.items():
            print("\n".join(flow(f"{name:<{width}}", question.split(), terminal_width())))
    failed = [name for name in names if not _succeeds(name, args.options)]
    if failed:
        raise MinillmError(f"{', '.join(failed)} failed: see above")


def find(folder: Path) -> dict[str, str]:
    """The benchmarks of a folder, with the question at the head of each; scripts without one are helpers.

    Raises:
        MinillmError: there is no such folder.
    """
    if not folder.is_dir():
        raise MinillmError("the benchmarks are not installed: they are in the folder benchmarks/ of a checkout")
    texts = {path.stem: ast.get_docstring(ast.parse(path.read_text("utf-8"))) for path in sorted(folder.glob("*.py"))}
    return {
        name: " ".join(text.split("\n\n")[0].partition("?")[0].split()) + "?"
        for name, text in texts.items()
        if text and "?" in text.split("\n\n")[0]
    }


def _succeeds(name: str, options: list[str]) -> bool:
    """Run a script in its own process, since it sets its threads before any import."""
    print(f"== {name}", file=sys.stderr, flush=True)
    process = subprocess.Popen([sys.executable, FOLDER / f"{name}.py", *options])
    with undone_by_signals(process.terminate):
        return process.wait() == 0
