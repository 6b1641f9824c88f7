"""What is printed of a model's words: text, and JSON of it."""

import codecs
import json
import sys
from typing import Any

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def show(text: str, end: str = "\n") -> None:
    r"""Print generated text at once.

    A model, or whoever wrote its weights or its prompt, must not drive the terminal: there, control characters other
    than line breaks and tabs are shown as escapes (`\x1b`). A file or a pipe gets the text as it is.
    """
    print(text.translate(_CONTROLS) if sys.stdout.isatty() else text, end=end, flush=True)


def as_json(value: Any) -> str:
    """JSON in one line, with the characters that are printable, and that standard output can hold, as they are."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = json.dumps(value, ensure_ascii=codecs.lookup(encoding).name != "utf-8")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
