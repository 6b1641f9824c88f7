"""What a file of tests depends on, as folders of this repository.

    python -m tests.dependencies tests/text/test_chat_hostile.py       print them

Imports flow one way, as tests/test_layering.py holds: the folders of minillm that the file and the tests' modules which
it imports name, and all that these import. `minillm.backends.cuda` counts where the word "cuda" is named, for nothing
else makes a device one. What cannot be told counts: a folder too many makes a test run again, one too few would not.
"""

import re
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

from .test_layering import FOLDERS

ROOT = Path(__file__).parents[1]
ALWAYS = ("pyproject.toml", "tests", "tests/data", "minillm", "minillm/assets")
"""For every test; of "tests" and "minillm" the files that lie in no folder of their own"""

PROGRAMS = ("benchmarks", "scripts")
CUDA = ("minillm/backends/cuda", "kernels/cuda")
CPU = ("minillm/backends/cpu", "kernels/cpu")
PAGES = "pages and tables"
"""What is read by people: few tests read it, too"""

READ = re.compile(r"\.md\b|\.csv\b|README|CHANGELOG|Dockerfile|compose|uv\.lock|LICENSE|CITATION")
IMPORT = re.compile(r"^[ \t]*from (\.+|tests\b)([\w.]*) import ([\w, ]+|\([^)]*\))", re.MULTILINE)
NAMED = re.compile(r"minillm[./](\w+)(?:[./](\w+))?")
FROM = re.compile(r"from minillm import ([\w, ]+|\([^)]*\))")
BY_NAME = re.compile(r"""["']tests\.([\w.]+)""")
"""A module of the tests that is imported by its name, or run as a process; after a last dot any of a folder"""

COMMAND = re.compile(r"""-m minillm\b|["']minillm["' ]|minillm[./]?["']?__main__""")
"""How a test names the command line, or the package without one of its modules"""


def is_page(path: Path) -> bool:
    table = path.suffix == ".csv" and not path.is_relative_to(ROOT / "tests")  # tests compare with theirs
    return table or path.name in ("README.md", "GLOSSARY.md") or path.parent == ROOT


@cache
def units() -> tuple[str, ...]:
    """All that can have changed: folders of minillm, tests and kernels, files of tests beside these, and the others."""
    inside = (path for top in ("minillm", "tests") for path in (ROOT / top).iterdir())
    names = {path.relative_to(ROOT).as_posix() for path in inside if path.is_dir() or path.name.startswith("test_")}
    named = {
        *ALWAYS,
        *PROGRAMS,
        *CUDA,
        *CPU,
        PAGES,
        "minillm/measure/accounting",
        "tests/backends/cpu",
        "tests/backends/cuda",
    }
    return tuple(sorted(named | {name for name in names if not name.endswith("__pycache__")}))


def files_of(unit: str) -> list[Path]:
    """A unit's files, without those of units inside it."""
    path = ROOT / unit
    if path.is_file():
        return [path]
    if unit == PAGES:
        places = [
            *ROOT.iterdir(),
            *(file for top in ("minillm", "kernels", *PROGRAMS) for file in files_below(ROOT / top)),
        ]
        return sorted(file for file in places if file.is_file() and is_page(file))
    inner = [ROOT / other for other in units() if other.startswith(f"{unit}/")]
    return [f for f in files_below(path) if not is_page(f) and not any(f.is_relative_to(other) for other in inner)]


def files_below(folder: Path) -> list[Path]:
    files = (file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return sorted(file for file in files if file.name != "exhaustive.json")


@cache
def digest(unit: str) -> str:
    """SHA-256 of the names and contents of a unit's files."""
    lines = (f"{f.relative_to(ROOT).as_posix()}\0{sha256(f.read_bytes()).hexdigest()}\0" for f in files_of(unit))
    return sha256("".join(lines).encode()).hexdigest()


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def helpers_of(path: Path) -> frozenset[Path]:
    """The modules of the tests that a file imports, but for those of families, whose folder counts as a whole."""
    files = set()
    for dots, module, names in IMPORT.findall(text_of(path)):
        start = ROOT / "tests" if dots == "tests" else path.parents[len(dots) - 1]
        base = start.joinpath(*filter(None, module.split(".")))
        for file in (
            base.with_suffix(".py"),
            base / "__init__.py",
            *(base / f"{n}.py" for n in re.findall(r"\w+", names)),
        ):
            if file.is_file():
                files.add(file)
    for name in BY_NAME.findall(text_of(path)):
        base = ROOT.joinpath("tests", *filter(None, name.split(".")))
        modules = base.glob("*.py") if name[-1] == "." else (base.with_suffix(".py"), base / "__init__.py")
        files |= {file for file in modules if file.is_file()}
    return frozenset(files)


def sources(path: Path) -> set[Path]:
    """A file of tests, the tests' modules that it imports, and each conftest.py of which it names a fixture."""
    files: set[Path] = set()
    waiting = {path}
    words = set(re.findall(r"(?:[(,]\s*|['\"])(\w+)\s*(?=[:,)'\"])", text_of(path)))  # parameters, and other words
    for parent in path.relative_to(ROOT).parents:
        conftest = ROOT / parent / "conftest.py"
        if conftest.is_file():
            defined = re.findall(r"@pytest\.fixture(\(.*autouse=True)?.*\n(?:@.*\n)*def (\w+)", text_of(conftest))
            waiting |= {conftest} if any(auto or name in words for auto, name in defined) else set()
    while waiting:
        files.add(file := waiting.pop())
        waiting |= helpers_of(file) - files
    return files


def below(parts: set[str]) -> set[str]:
    """Parts of minillm, and all that they import."""
    complete = set(parts)
    for part in reversed(FOLDERS):  # each imports those before it alone
        if part in complete:
            complete |= set(FOLDERS[part].split())
    return complete


def dependencies(path: Path) -> set[str]:
    """The units that a file of tests depends on."""
    files = sources(path)
    texts = [text_of(file) for file in files]
    text = "\n".join(texts)
    found = {*ALWAYS, *(f"minillm/{part}" for part in below(parts_named(text)))}
    found |= {unit for unit in units() if any(file.is_relative_to(ROOT / unit) for file in files)}
    if any(file.name in ("families.py", "seq2seq.py") for file in files):
        found.add("tests/models")  # they import the tests of each family by its name
    if any(program in text or program in path.relative_to(ROOT).parts for program in PROGRAMS):
        found |= {unit for unit in units() if not unit.startswith("tests/")}
    if "golden" in text:
        found |= {unit for unit in units() if unit.startswith("tests/golden")}
    if '"real"' in text:
        found.add("tests/real")
    if READ.search(text):
        found.add(PAGES)
    if "minillm/backends" in found:
        found |= {*CPU, *(CUDA if "cuda" in text else ())}
    return found & {*units()} if "cuda" in text else found & {*units()} - {*CUDA}


def parts_named(text: str) -> set[str]:
    """The parts of minillm that a text names: those of test_layering.py's table."""
    parts = {"minillm"} if "import minillm" in text else set()
    for names in FROM.findall(text):
        parts |= {name if name in FOLDERS else "minillm" for name in re.findall(r"\w+", names)}
    for name, inner in NAMED.findall(text):
        parts.add("measure/accounting" if (name, inner) == ("measure", "accounting") else name)
    if COMMAND.search(text):
        parts |= {"cli", "integrations", *FOLDERS}
    return parts & {*FOLDERS}


if __name__ == "__main__":
    print(*sorted(dependencies(ROOT / sys.argv[1])), sep="\n")
