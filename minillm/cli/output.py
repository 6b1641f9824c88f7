"""Output of the commands: generated text, JSON, numbers with units, tables and HTML pages."""

import codecs
import json
import logging
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar

from .. import __version__
from ..errors import printable
from ..output_files import write_file
from ..progress import PROMPT, work

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

T = TypeVar("T")

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def show(text: str, end: str = "\n", file: TextIO | None = None) -> None:
    r"""Print generated text at once, by default on standard output.

    Generated text must not control the terminal: there, control characters other than line breaks and tabs are shown
    as escapes (`\x1b`). A file or a pipe gets the text unchanged.
    """
    file = sys.stdout if file is None else file
    print(text.translate(_CONTROLS) if file.isatty() else text, end=end, file=file, flush=True)


@contextmanager
def text_alone() -> Iterator[None]:
    """Hold back all messages for the terminal until the end of the `with` block, which prints text.

    Messages are log records and Python's warnings: in the middle of a line they would be taken for the model's words.
    The text may come to the terminal through a pipe (`| tee FILE`), so only messages to a file or a pipe go there at
    once.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    from logging.handlers import MemoryHandler

    root, handler = logging.getLogger(), MemoryHandler(sys.maxsize, flushLevel=sys.maxsize)
    handlers, root.handlers = root.handlers, [handler]
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers = handlers
        for record in handler.buffer:
            root.handle(record)


def read_first(pieces: Iterator[T]) -> Iterator[T]:
    """The same pieces, the first made at once; a bar shows how much of its prompt is computed."""
    with work(PROMPT, None, "tokens"):
        first = next(pieces, None)
    return chain(() if first is None else (first,), pieces)


def note(text: str) -> None:
    """Print a line about generated text on standard error, dim on a terminal."""
    dim = sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    text = "\n".join(wrapped(printable(text), terminal_width(sys.stderr)))
    print(f"\x1b[2m{text}\x1b[0m" if dim else text, file=sys.stderr, flush=True)


def as_json(value: Any) -> str:
    """JSON in one line; characters that are not printable, or not in standard output's encoding, are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = json.dumps(value, ensure_ascii=codecs.lookup(encoding).name != "utf-8")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def quoted(tokenizer: "Tokenizer", token_id: int) -> str:
    r"""A token as a JSON string; bytes that are not a whole character, which JSON cannot hold, as `"\xe6"`."""
    try:
        tokenizer.token_bytes(token_id).decode()
    except UnicodeDecodeError as error:
        parts = error.object.decode("utf-8", "surrogateescape")  # a byte b becomes U+DC00 + b
        shown = (f"\\x{ord(c) - 0xDC00:02x}" if "\udc80" <= c <= "\udcff" else as_json(c)[1:-1] for c in parts)
        return f'"{"".join(shown)}"'
    return as_json(tokenizer.token(token_id))


def tokens_of(tokenizer: "Tokenizer | None", ids: Sequence[int]) -> list[str] | None:
    """The text of each token, for display; None without a tokenizer."""
    return None if tokenizer is None else [tokenizer.token(token) for token in ids]


def title(prompt: str, number: int, count: int) -> None:
    """Print a line that names the prompt whose results follow, if there are several."""
    if count > 1:
        print_report([""] * (number > 0) + [f"{number + 1} of {count}: {as_json(prompt)}"])


def number_text(value: float) -> str:
    """A number with four digits and an SI prefix."""
    for power, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            scaled = value / power
            return f"{scaled:.{3 if scaled < 10 else 2 if scaled < 100 else 1}f} {unit}"
    return f"{value:.0f}"


def bytes_text(value: float) -> str:
    """Bytes with an SI prefix: 1 GB is 10^9 bytes."""
    text = number_text(value)
    return f"{text}B" if " " in text else f"{text} B"


def seconds_text(value: float) -> str:
    """Seconds in s, ms, us or ns."""
    for power, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= power:
            return f"{value / power:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that standard output, or another stream, is; None for a file, whose lines are whole."""
    stream = stream or sys.stdout
    return shutil.get_terminal_size().columns if stream is not None and stream.isatty() else None


def columns_of(text: str) -> int:
    """Columns that a text takes in a terminal: two for a wide character, none for a combining one."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in text)


def wrapped(text: str, width: int | None) -> list[str]:
    """A line, broken between words where it is wider than `width`; its own indentation continues."""
    if width is None or columns_of(text) <= width:
        return [text]
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)


def flow(first: str, items: Iterable[str], width: int | None, gap: str = " ") -> list[str]:
    """A line that begins with `first` and goes on with `items`; where `width` ends, it is continued below them.

    If that leaves less than half of the width, the items are on lines of their own.
    """
    indent = " " * columns_of(first)
    lines = [first]
    if width is not None and len(indent) > width / 2:
        indent = " " * 4
        lines.append(indent)
    for item in items:
        line = lines[-1] + item if lines[-1] in (first, indent) else f"{lines[-1]}{gap}{item}"
        if width is not None and columns_of(line) > width and lines[-1] not in (first, indent):
            lines.append(indent + item)
        else:
            lines[-1] = line
    return [line.rstrip() for line in lines if line.strip()]


class Table(NamedTuple):
    """A table for the terminal or for a page."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    """Cells of each row; a short one ends early"""
    title: str = ""
    note: str = ""
    """A line below the table"""

    def lines(self, width: int | None = None) -> list[str]:
        """The table as text, folded if it is wider than `width`."""
        title, note = (wrapped(text, width) if text else [] for text in (self.title, self.note))
        return [*title, *chain.from_iterable(self.folded(width)), *note]

    def folded(self, width: int | None) -> list[list[str]]:
        """The lines of the head and of each row: the first cell aligned to the left, the others to the right.

        If they do not fit into `width`, each row is folded: its cells are on as few lines as possible, at the same
        places in each row; and the first cell, if there is no room beside them, on a line above.
        """
        rows = [self.head, *self.rows]
        first, *widths = [max(map(columns_of, column)) for column in zip_longest(*rows, fillvalue="")]
        beside, count, places = first, len(widths), widths
        if width is not None:
            for lines, beside in product(range(1, len(widths) + 1), (first, 0)):
                count = -(-len(widths) // lines)
                places = [max(widths[i::count]) for i in range(count)]
                if beside + sum(places) + 2 * count <= width:
                    break
        folded = []
        for label, *cells in rows:
            groups = [cells[i : i + count] for i in range(0, len(cells), count)]
            below = [
                "".join(f"  {_right(cell, columns)}" for cell, columns in zip(group, places, strict=False))
                for group in groups
            ]
            above = [] if beside else wrapped(label, width)
            if beside:
                start = label + " " * (first - columns_of(label))
                below = [start + "".join(below[:1]), *(" " * first + line for line in below[1:])]
            folded.append([*above, *(line.rstrip() for line in below if line.strip())])
        return folded


def print_report(lines: Iterable[str | Table]) -> None:
    """Print lines and tables, folded where they are wider than the terminal."""
    width = terminal_width()
    for line in lines:
        print("\n".join(line.lines(width) if isinstance(line, Table) else wrapped(line, width)))


def _right(cell: str, width: int) -> str:
    return " " * (width - columns_of(cell)) + cell


def write_page(path: Path, template: str, **data: Any) -> None:
    """Render a template of the folder `templates` and write the page.

    Args:
        path: the page
        template: file name
        **data: values of the template, escaped where they stand in the page

    Raises:
        UsageError: the file cannot be written.
    """
    import jinja2

    package = Path(__file__).parents[1]
    loader = jinja2.FileSystemLoader([package / "cli/templates", package / "server/page"])  # which has the colours
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number_text, "bytes": bytes_text, "seconds": seconds_text}
    write_file(path, environment.get_template(template).render(version=__version__, **data))
