"""Output of the commands: generated text, JSON, numbers with units, tables and HTML pages."""

import codecs
import json
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..errors import printable
from ..output_files import write_file

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def show(text: str, end: str = "\n") -> None:
    r"""Print generated text at once.

    Generated text must not control the terminal: there, control characters other than line breaks and tabs are shown
    as escapes (`\x1b`). A file or a pipe gets the text unchanged.
    """
    print(text.translate(_CONTROLS) if sys.stdout.isatty() else text, end=end, flush=True)


def as_json(value: Any) -> str:
    """JSON in one line; characters that are not printable, or not in standard output's encoding, are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = json.dumps(value, ensure_ascii=codecs.lookup(encoding).name != "utf-8")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def token_text(token: str) -> str:
    """A token as a label in a drawing: spaces are visible, control characters escaped."""
    return printable(token).replace(" ", "␣")


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


class Table(NamedTuple):
    """A table for the terminal or for a page."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    """Cells of each row; a short one ends early"""
    title: str = ""
    note: str = ""
    """A line below the table"""

    def lines(self) -> list[str]:
        """The table as text: the first column aligned to the left, the others to the right."""
        widths = [max(map(len, column)) for column in zip_longest(self.head, *self.rows, fillvalue="")]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in (self.head, *self.rows)
        ]
        return [*filter(None, [self.title]), *lines, *filter(None, [self.note])]


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

    loader = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number_text, "bytes": bytes_text, "seconds": seconds_text}
    write_file(path, environment.get_template(template).render(version=__version__, **data))
