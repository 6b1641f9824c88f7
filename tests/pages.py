"""The pages of the repository (README.md and the guides beside the code), and the blocks in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "minillm").rglob("*.md"), *ROOT.glob("[bkt]*/*.md"))
    if path.parent.name != "lessons"  # which tests/course runs
)
"""Every page: at the top, in minillm/, kernels/, benchmarks/ and tests/"""


def page(name: str) -> str:
    """The text of a page."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language: "python", "sh", "console", or "" for none."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page(name), re.DOTALL | re.MULTILINE)
    return [text for written, text in fenced if written == language]


def block(name: str, language: str, beginning: str) -> str:
    """The only block of a page that begins so."""
    (text,) = [text for text in blocks(name, language) if text.startswith(beginning)]
    return text
