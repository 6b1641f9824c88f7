"""The twenty questions of the course's page: what answers each is there, in the function and file that it names."""

import ast
import re

import pytest

from ..pages import ROOT, page

ROWS = re.findall(
    r"^\| (\d+) \| (.+?\?) \| `([\w/]+\.py)::([\w.]+)` \| `(.+)` \|$", page("minillm/course/README.md"), re.M
)


def source_of(path: str, name: str) -> str:
    """The source of a function or of a class's method."""
    text = (ROOT / "minillm" / path).read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        [node] = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part]
    return ast.get_source_segment(text, node) or ""


def test_there_are_twenty() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 21))


@pytest.mark.parametrize(("number", "question", "path", "name", "line"), ROWS, ids=[row[3] for row in ROWS])
def test_the_line_that_answers_is_in_the_function(number: str, question: str, path: str, name: str, line: str) -> None:
    assert line in source_of(path, name)


def test_most_are_about_the_files_of_the_spine() -> None:
    guide = page("minillm/README.md")
    spine = set(re.findall(r"^\| `([\w/]+\.py)` \| \d+ \|", guide, re.MULTILINE))
    assert len([path for _, _, path, _, _ in ROWS if path in spine]) >= 17
