"""Printing of generated text, plain and as JSON."""

import codecs
import json
import sys
from typing import Any

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
