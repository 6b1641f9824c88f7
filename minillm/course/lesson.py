"""A lesson: read from Markdown, written as a notebook, run as text.

Code between ```python and ``` is a cell; what is between cells is prose. The first line is the title, `# 3 Decoding by
hand`; a line `Time: 40 minutes.` follows.
"""

import ast
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LESSONS = Path(__file__).parent / "lessons"
_CELL = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """A part of a lesson."""

    text: str
    is_code: bool


@dataclass(frozen=True)
class Lesson:
    """A lesson of the course."""

    path: Path
    number: int
    title: str
    minutes: int
    cells: tuple[Cell, ...]

    @classmethod
    def read(cls, path: Path) -> "Lesson":
        """The lesson in a file."""
        text = path.read_text(encoding="utf-8")
        number, title = re.findall(r"\A# (\d+) (.*)$", text, re.MULTILINE)[0]
        [minutes] = re.findall(r"^Time: (\d+) minutes", text, re.MULTILINE)
        cells = []
        for i, part in enumerate(_CELL.split(text)):  # prose and code by turns
            if part.strip():
                cells.append(Cell(part.strip("\n"), is_code=bool(i % 2)))
        return cls(path, int(number), title, int(minutes), tuple(cells))

    def notebook(self) -> dict[str, Any]:
        """The lesson as a notebook of version 4.5, without outputs, for `json.dumps`."""
        cells = []
        for i, cell in enumerate(self.cells):
            common = {"id": f"cell-{i}", "metadata": {}, "source": cell.text.splitlines(keepends=True)}
            code: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []}
            cells.append(common | (code if cell.is_code else {"cell_type": "markdown"}))
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
        return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}

    def write(self, folder: Path) -> Path:
        """Write the notebook into a folder, unless it is there: it may have a learner's answers. Returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.path.stem}.ipynb"
        if not path.exists():
            path.write_text(json.dumps(self.notebook(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    def run(self, show: Callable[[Any], str] = repr) -> Iterator[tuple[Cell, str]]:
        """Run the code here, cell by cell.

        Args:
            show: the text of a cell's last value, if that is not None

        Yields:
            Each cell, with what it printed and its last value as text; "" for prose.
        """
        names: dict[str, Any] = {"__name__": "__lesson__"}
        for cell in self.cells:
            yield cell, run_cell(cell.text, names, show) if cell.is_code else ""


def lessons() -> list[Lesson]:
    """All lessons, by number."""
    return sorted((Lesson.read(path) for path in LESSONS.glob("*.md")), key=lambda lesson: lesson.number)


def run_cell(code: str, names: dict[str, Any], show: Callable[[Any], str]) -> str:
    """Run a cell as a notebook does: the value of a last line that is an expression is shown."""
    tree, printed = ast.parse(code), io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    return printed.getvalue() + ("" if value is None else f"{show(value)}\n")
