"""minillm course: lessons on the engine, in Jupyter or as text."""

import argparse
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MinillmError, ParameterError, UsageError, install
from ..output_files import undone_by_signals
from .output import Table, print_report, wrapped
from .parser import Parser

if TYPE_CHECKING:
    from ..course.lesson import Lesson

DESCRIPTION = """List the lessons of the course, or open one in Jupyter.

A lesson steps through the modules that serve: it imports and runs them, and
copies nothing. It opens as a notebook in a folder of yours, so that your
answers to its exercises stay. Without Jupyter --text runs it in the terminal.
What follows -- is for Jupyter."""

EPILOG = """examples:
  minillm course
  minillm course 3
  minillm course 3 --text
  minillm course 3 --solutions
  minillm course 3 -- --no-browser --port 8890
"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    parser.pass_on()
    parser.add_argument("lesson", nargs="?", type=int, metavar="NUMBER", help="the lesson; without one all are listed")
    parser.add_argument("--text", action="store_true", help="run it here, as text")
    parser.add_argument("--solutions", action="store_true", help="print answers to its exercises")
    parser.add_argument("--write", action="store_true", help="write the notebook and do not open it")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("minillm-course"),
        metavar="DIR",
        help="for the notebook, which is kept if it is there (default: minillm-course)",
    )


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..course.lesson import lessons

    known = {lesson.number: lesson for lesson in lessons()}
    opens = args.lesson is not None and not (args.text or args.solutions or args.write)
    if args.passed_on and not opens:
        raise UsageError("what follows -- is for Jupyter, which opens a lesson: leave out --text, --solutions, --write")
    if args.lesson is None:
        rows = [[f"{lesson.number:>2}  {lesson.title}", f"{lesson.minutes} min"] for lesson in known.values()]
        print_report([Table(["lesson", "time"], rows)])
        return
    if args.lesson not in known:
        raise ParameterError(f"there is no lesson {args.lesson}: expected one of {', '.join(map(str, known))}")
    lesson = known[args.lesson]
    if args.text:
        _as_text(lesson)
    elif args.solutions:
        print((lesson.path.parents[1] / "solutions" / f"lesson_{lesson.number:02}.py").read_text("utf-8"), end="")
    else:
        _as_notebook(lesson, args.folder, None if args.write else args.passed_on)


def _as_notebook(lesson: "Lesson", folder: Path, options: list[str] | None) -> None:
    """Write a lesson's notebook, and open it in Jupyter with these options; None: only write it.

    Raises:
        UsageError: Jupyter is not installed.
        MinillmError: Jupyter failed.
    """
    program = next((name for name in ("jupyterlab", "notebook") if find_spec(name) is not None), None)
    if options is not None and program is None:
        raise UsageError(f"a notebook opens in Jupyter: {install('course')}; or run it here with --text")
    path = lesson.write(folder)
    print(path, flush=True)
    if options is None or program is None:
        return
    address = [f"--LabApp.default_url=/lab/tree/{path.name}"] if program == "jupyterlab" else []  # that it prints
    process = subprocess.Popen([sys.executable, "-m", program, str(path), *address, *options])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is Jupyter's, which asks whether to end
    try:
        with undone_by_signals(process.terminate):
            code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    if code:
        raise MinillmError(
            f"Jupyter ended with exit code {code}: see above; what follows -- goes to it, as in "
            f"`minillm course {lesson.number} -- --allow-root`"
        )


def _as_text(lesson: "Lesson") -> None:
    """Run a lesson and print its prose, code and output."""
    for cell, output in lesson.run(_shown):
        if not cell.is_code:
            for paragraph in cell.text.split("\n\n"):
                whole = paragraph.startswith(("|", "    ", "-", "#"))
                print("\n".join([paragraph] if whole else wrapped(" ".join(paragraph.split("\n")), 100)), end="\n\n")
            continue
        print("\n".join(f">>> {line}" for line in cell.text.splitlines()))
        print(output)
    print("To answer an exercise, write its function in a file or in Python, and give it to minillm.course.check.")


def _shown(value: Any) -> str:
    """The last value of a cell as text: tables as tables, figures by their titles."""
    from ..course.drawing import Undrawn

    if isinstance(value, Undrawn):
        return repr(value)
    if hasattr(value, "head") and hasattr(value, "rows"):
        note = getattr(value, "note", "")
        return "\n".join(Table(value.head, value.rows(), note=note).lines(None))
    if hasattr(value, "savefig"):
        title = value.get_suptitle() or ", ".join(axis.get_title() for axis in value.axes if axis.get_title())
        return f"[a figure, drawn in Jupyter: {title}]"
    return repr(value)
