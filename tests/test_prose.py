"""Prose and names that a program can hold: docstrings begin with their subject, locals are called what they are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "minillm"
OPENINGS = {"Of", "What", "That"}


def nodes(pattern: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node of the package's sources in which the pattern occurs, with the file that has it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if re.search(pattern, source):  # parsing all of them takes seconds
            for node in ast.walk(ast.parse(source)):
                yield str(path.relative_to(PACKAGE)), node


def test_no_docstring_opens_with_a_word_that_leans_on_another() -> None:
    leaning = []
    for file, node in nodes(rf"""["']\s*({"|".join(OPENINGS)})\s"""):
        text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
        if isinstance(text, str) and text.split(maxsplit=1)[:1] in [[word] for word in OPENINGS]:
            leaning.append(f"{file}:{node.lineno}: {text.strip()[:60]}")
    assert not leaning, "\n".join(leaning)


@pytest.mark.longer
def test_no_variable_is_called_found() -> None:
    """A variable is called what it is: `tokenizer`, `rows`, `pages`; loops, comprehensions and parameters too."""
    places = []
    for file, node in nodes(r"\bfound\b\s*([])=:,+|-]|in\b)"):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            name = node.arg if isinstance(node, ast.arg) else None
        if name == "found":
            places.append(f"{file}:{node.lineno}")
    assert not places, "\n".join(places)
