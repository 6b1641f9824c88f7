"""Imports flow one way: what a folder imports stands above it in the table below."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "minillm"

GROUND = (
    *("errors", "files", "output_files", "progress_bar", "progress", "parallel", "config", "encoder_input", "batch"),
    "plugins",
)
"""Files that everything may import; each imports only those before it"""

FOLDERS = {
    "reference": "",
    "text": "",
    "backends": "reference",
    "cache": "backends",
    "decoding": "reference text backends",
    "layers": "reference backends",
    "models": "reference backends layers",
    "measure/accounting": "reference backends cache models",
    "runner": "reference backends cache decoding layers models",
    "tasks": "reference text decoding runner",
    "formats": "reference text backends decoding models tasks",
    "distributed": "reference backends cache decoding models runner formats",
    "engine": "reference text backends cache decoding models measure/accounting runner tasks formats distributed",
    "measure": "reference text backends cache decoding models measure/accounting runner engine",
    "pipelines": "reference text decoding tasks engine",
    "lm_eval": "reference backends decoding engine",
    "minillm": "decoding engine pipelines",
    "course": "backends",
    "server": "text backends decoding formats tasks engine measure minillm",
    "cli": "text backends decoding models measure/accounting tasks formats distributed engine measure pipelines"
    " minillm server course",
    "integrations": "text decoding tasks formats engine cli",
    "__main__": "minillm cli",
}
"""Folder, or file beside them -> the folders that it imports. "minillm" is the package's own __init__.py."""

STATEMENT = re.compile(r"^[ \t]*((?:from[ \t]+[.\w]+[ \t]+)?import\b(?:[^(\n]*\([^)]*\)|[^(\n]*))", re.MULTILINE)
"""A line that begins as an import does, to the end of its parentheses; no line has two statements (ruff's E70)"""

PARTS = [*GROUND, *FOLDERS]
STRATEGY_MAY = {"backends", "decoding", "errors", "reference", "text"}


def part_of(module: str) -> str:
    """The part that a module of minillm, or a name in one, belongs to."""
    path = module.split(".")[1:]
    names = ["/".join(path[:length]) for length in range(len(path), 0, -1)]
    return next((name for name in names if name in PARTS), "minillm")  # a name like __version__ is the package's


def imports(path: Path) -> set[str]:
    """The parts of minillm that a file imports, wherever in it."""
    package = ["minillm", *path.relative_to(PACKAGE).parts[:-1]]
    modules: set[str] = set()
    for node in ast.parse("\n".join(STATEMENT.findall(path.read_text(encoding="utf-8")))).body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            modules |= {f"{stem}.{alias.name}" for alias in node.names}
    return {part_of(module) for module in modules if module.split(".")[0] == "minillm"}


@cache
def edges() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE.parent).with_suffix("")
        part = part_of(".".join(inside.parts if inside.name != "__init__" else inside.parts[:-1]))
        graph.setdefault(part, set()).update(imports(path) - {part})
    return graph


def test_every_part_is_in_the_table_and_the_table_names_no_other() -> None:
    paths = [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/__init__.py")]
    names = {(path.parent if path.name == "__init__.py" else path).stem for path in paths}
    assert names | {"measure/accounting"} == set(PARTS) == set(edges())


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_what_the_table_says_and_nothing_below_it(part: str) -> None:
    folders = {name for name in edges()[part] if name not in GROUND}
    assert folders == set(FOLDERS.get(part, "").split())
    assert edges()[part] <= set(PARTS[: PARTS.index(part)])


def test_the_servers_files_import_one_way_also_for_their_types() -> None:
    graph: dict[str, set[str]] = {}
    for path in (PACKAGE / "server").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1}
        graph[path.stem] = {module for module in modules if module is not None}
    assert graph.keys() >= {"app", "state", "server_request"}
    TopologicalSorter(graph).prepare()  # raises if there is a circle


def test_few_folders_and_files_stand_at_the_top() -> None:
    files = list(PACKAGE.glob("*.py"))
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert len(files) <= 13 and len(folders) <= 19


@pytest.mark.parametrize("name", ["strategy", "sampling", "beam"])
def test_a_strategy_knows_no_model_cache_or_runner(name: str) -> None:
    assert imports(PACKAGE / "decoding" / f"{name}.py") <= STRATEGY_MAY


def test_imports_are_found_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "models" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "from ..cache import A\nfrom .. import engine\nfrom . import opt\nfrom ..measure import accounting\n"
        "def f():\n  import minillm.cli.main\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert imports(path) == {"cache", "engine", "models", "measure/accounting", "cli"}


# --- what importing costs ---------------------------------------------------------------------------------------------

HEAVY = {
    "numpy",
    "cupy",
    "ml_dtypes",
    "tqdm",
    "tokenizers",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "torch",
    "transformers",
    "safetensors",
    "sentencepiece",
    "zipfile",
    "pickletools",
}


def loaded_after(code: str) -> set[str]:
    """The heavy modules that a fresh interpreter has loaded after running `code`."""
    report = f"\nimport sys; print('LOADED', *({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return set(result.stdout.split("LOADED")[-1].split())


HELP = "from minillm.cli.main import build_parser\nbuild_parser().format_help()"


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import minillm, minillm.formats; minillm.GenerationConfig; minillm.Engine", {"numpy"}),
        (f"{HELP}\ntry:\n    build_parser().parse_args(['generate', '--help'])\nexcept SystemExit: pass", set()),
    ],
    ids=["Engine", "command line"],
)
def test_importing_loads_nothing_heavy(code: str, loaded: set[str]) -> None:
    assert loaded_after(code) <= loaded
