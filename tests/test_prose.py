"""Prose that a program can hold: docstrings, those of attributes too, begin with their subject."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "minillm"
OPENINGS = {"Of", "What", "That"}


def test_no_docstring_opens_with_a_word_that_leans_on_another() -> None:
    leaning = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            if isinstance(text, str) and text.split(maxsplit=1)[:1] in [[word] for word in OPENINGS]:
                leaning.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {text.strip()[:60]}")
    assert not leaning, "\n".join(leaning)
