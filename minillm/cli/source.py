"""minillm source: where a term of the glossary is implemented."""

import argparse
import ast
import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..errors import MinillmError, ParameterError, shown
from .output import as_json
from .parser import Parser

DESCRIPTION = """Print where a term of the field is implemented: file, line and name, from
minillm/GLOSSARY.md. A word, several, or a field such as top_p; without one the
terms are listed."""

EPILOG = """examples:
  minillm source top_p
  minillm source copy on write
"""

PACKAGE = Path(__file__).parents[1]
GLOSSARY = PACKAGE / "GLOSSARY.md"


class Entry(NamedTuple):
    """A row of the glossary."""

    terms: str
    files: list[tuple[str, list[str]]]
    """Paths as they are written there, each with the names in it that are meant"""


class Location(NamedTuple):
    """A place in the source."""

    path: Path
    line: int
    name: str
    """The name that is defined there; "" of a file"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    parser.add_argument("term", nargs="*", metavar="TERM", help="a term of the glossary; without one all are listed")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each place")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    entries = read_glossary()
    if not args.term:
        print("\n".join(entry.terms for entry in entries))
        return
    term = " ".join(args.term)
    for entry in matching(entries, term):
        if not args.json:
            print(entry.terms)
        for path, line, name in locate(entry, term):
            if args.json:
                print(as_json({"terms": entry.terms, "path": str(path), "line": line, "name": name}))
            else:
                print(f"  {_from_here(path)}:{line}  {name}".rstrip())


def read_glossary() -> list[Entry]:
    """The rows of GLOSSARY.md."""
    entries = []
    for terms, files in re.findall(r"^\| (.+?) \| (.+) \|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE):
        if "`" in files:
            paths = re.findall(r"`([\w.*/]+(?:\.\w+|/))`(?: \(((?:`[\w.]+`(?:, )?)+)\))?", files)
            entries.append(
                Entry(
                    terms,
                    [
                        (path, re.findall(r"\w+(?=`)", names))
                        for path, names in paths
                        if "/" in path or path.endswith(".py")
                    ],
                )
            )
    return entries


def words(text: str) -> list[str]:
    """The words of a term or of a name: ["top", "p"] of top-p, top_p and TopP."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
    return re.findall(r"[a-z0-9]+", apart.lower())


def contains(text: list[str], part: list[str]) -> bool:
    """Whether words stand in a text, beside each other, a plural taken for its singular."""
    text, part = ([word.removesuffix("s") for word in line] for line in (text, part))
    return bool(part) and any(text[i : i + len(part)] == part for i in range(len(text)))


def matching(entries: list[Entry], term: str) -> list[Entry]:
    """The rows that have a term.

    Raises:
        ParameterError: there is none; the message names terms like it.
    """
    rows = [entry for entry in entries if contains(words(entry.terms), words(term))]
    if rows:
        return rows
    terms = [part.strip() for entry in entries for part in re.split(r"[,;:()]", entry.terms) if part.strip()]
    near = get_close_matches(term.replace("_", " "), terms, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "`minillm source` lists the terms"
    raise ParameterError(f"{shown(term)} is no term of the glossary: {hint}")


def locate(entry: Entry, term: str) -> list[Location]:
    """The places of a row: the names that it gives, else definitions named after the term, else where it is said.

    Of several files (`reference/*.py`) those that define one of the names, or something that contains it.
    """
    places = []
    for pattern, names in entry.files:
        for path in files_of(pattern):
            lines = definitions(path)
            if names and "*" in pattern:
                places += [Location(path, line, name) for name, line in lines if any(part in name for part in names)]
                continue
            named = [(name, line) for name, line in lines if name in names]
            after_term = [(name, line) for name, line in lines if contains(words(name), words(term))]
            places += [Location(path, line, name) for name, line in named or after_term or [("", _said(path, term))]]
    return places


def _said(path: Path, term: str) -> int:
    """The first line of a file that has a term; 1 if none has."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((number for number, line in enumerate(lines, 1) if contains(words(line), words(term))), 1)


def files_of(pattern: str) -> list[Path]:
    """The files of a path in the glossary, relative to the package or to the repository.

    Raises:
        MinillmError: there are none.
    """
    for folder in (PACKAGE, PACKAGE.parent):
        paths = sorted(folder.glob(pattern.rstrip("/")))
        files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
        if files := [file for file in files if file.is_file() and file.name != "__init__.py"]:
            return files
    raise MinillmError(f"{pattern} is named in GLOSSARY.md and is not there")


@cache
def definitions(path: Path) -> list[tuple[str, int]]:
    """Names defined in a file of Python, and their lines; in other files nothing."""
    if path.suffix != ".py":
        return []
    names: list[tuple[str, int]] = []
    values: list[tuple[str, int]] = []
    arguments: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append((node.name, node.lineno))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            values.append((node.target.id, node.lineno))
        elif isinstance(node, ast.Assign):
            values += [(target.id, node.lineno) for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
            arguments.append((node.arg, node.lineno))
    for others in (values, arguments):  # a name is found where it means most
        known = {name for name, _ in names}
        names += [pair for name, pair in {pair[0]: pair for pair in reversed(others)}.items() if name not in known]
    return sorted(names, key=lambda name: name[1])


def _from_here(path: Path) -> Path:
    """A path relative to the working directory, if it is below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
