"""Imports flow one way: every edge between the parts of minillm is in the table below, and there is no cycle."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "minillm"

BASE = {"errors"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "progress": {"output_files"},
    "batch": {"source_text"},
    "source_text": set(),
    "stats": set(),
    "files": BASE,
    "output_files": BASE,
    "config": BASE | {"files"},
    "tokenizer": BASE | {"files"},
    "schemas": BASE,
    "chat": BASE | {"schemas"},
    "checkpoint": BASE | {"files", "output_files", "progress"},
    "reference": BASE | {"batch"},
    "turns": BASE,
    "parallel": BASE,
    "backends": BASE | {"batch", "output_files", "progress", "reference"},
    "cache": BASE | {"backends", "batch", "config"},
    "decoding": BASE | {"backends", "display", "reference", "schemas", "stats"},
    "display": BASE | {"tokenizer"},
    "request": BASE | {"config", "decoding", "reference", "tokenizer"},
    "results": {"decoding", "display", "tokenizer"},
    "dispatch": BASE | {"decoding", "loop", "progress", "results", "turns"},
    "arguments": BASE | {"decoding", "tokenizer"},
    "layers": {"backends", "batch", "reference"},
    "models": BASE | {"backends", "batch", "checkpoint", "config", "files", "layers", "progress", "reference"},
    "distributed": BASE
    | {"backends", "batch", "cache", "config", "loading", "models", "parallel", "reference", "runner"},
    "pooling": BASE | {"config"},
    "sentence_files": BASE | {"checkpoint", "config", "files", "pooling"},
    "text_messages": BASE | {"chat", "pooling", "tokenizer"},
    "loading": BASE
    | {
        *("backends", "chat", "checkpoint", "config", "decoding", "files", "models", "pooling", "sentence_files"),
        "tokenizer",
    },
    "hardware": BASE | {"backends"},
    "accounting": BASE | {"backends", "batch", "config", "hardware", "models", "parallel", "reference"},
    "encoder_pass": BASE | {"backends", "batch", "cache", "models"},
    "runner": BASE | {"backends", "batch", "cache", "decoding", "encoder_pass", "models", "reference"},
    "footprint": {"accounting", "backends", "checkpoint", "models", "runner"},
    "scheduler": BASE | {"backends", "batch", "cache", "decoding", "runner", "source_text", "stats"},
    "ahead": BASE | {"backends", "batch", "decoding", "reference", "runner", "scheduler"},
    "loop": BASE
    | {"ahead", "backends", "batch", "decoding", "reference", "runner", "scheduler", "source_text", "stats"},
    "inspect": {"backends", "batch", "cache", "progress", "reference", "runner", "source_text"},
    "embedding": BASE
    | {"batch", "chat", "config", "pooling", "progress", "request", "runner", "text_messages", "tokenizer"},
    "engine_base": BASE
    | {
        *("arguments", "backends", "cache", "config", "dispatch", "display", "distributed", "embedding", "footprint"),
        *(
            "loading",
            "loop",
            "models",
            "parallel",
            "progress",
            "request",
            "runner",
            "scheduler",
            "stats",
            "tokenizer",
        ),
    },
    "engine": BASE
    | {
        *("arguments", "chat", "config", "decoding", "dispatch", "embedding", "engine_base", "inspect", "pooling"),
        *("progress", "request", "results", "tokenizer"),
    },
    "quantizing": BASE | {"backends", "checkpoint", "config", "models", "output_files", "progress", "reference"},
    "gguf_writing": BASE
    | {
        *("backends", "checkpoint", "config", "loading", "models", "output_files", "progress", "quantizing"),
        *("reference", "tokenizer"),
    },
    "pipelines": BASE | {"decoding", "engine", "files", "request", "results", "tokenizer"},
    "server": BASE
    | {
        "aio",
        "chat",
        "comparison",
        "decoding",
        "display",
        "embedding",
        "engine",
        "minillm",
        "request",
        "results",
        "tokenizer",
    },
    "batches": BASE | {"engine", "output_files", "progress", "server"},
    "replicas": BASE | {"batches", "engine", "progress", "server"},
    "precision": BASE | {"engine", "models", "progress", "request"},
    "profiling": BASE
    | {"backends", "cache", "decoding", "engine", "hardware", "loop", "reference", "request", "runner"}
    | {"progress", "scheduler"},
    "comparison": {"backends", "decoding", "engine", "loop", "progress", "request", "scheduler"},
    "engine_thread": BASE | {"decoding", "engine", "results", "scheduler"},
    "aio": BASE | {"arguments", "chat", "decoding", "engine", "engine_thread", "request", "results", "scheduler"},
    "cli": BASE
    | {
        "accounting",
        "batches",
        "backends",
        "chat",
        "checkpoint",
        "comparison",
        "config",
        "decoding",
        "distributed",
        "embedding",
        "engine",
        "files",
        "gguf_writing",
        "hardware",
        "inspect",
        "loading",
        "minillm",
        "models",
        "output_files",
        "parallel",
        "pipelines",
        "precision",
        "profiling",
        "progress",
        "quantizing",
        "replicas",
        "request",
        "results",
        "server",
        "tokenizer",
    },
    "__main__": {"cli"},
    "minillm": BASE | {"aio", "decoding", "engine", "pipelines", "results"},
}
"""A module or sub-package of minillm -> those it may import."""

STATEMENT = re.compile(r"^[ \t]*((?:from[ \t]+[.\w]+[ \t]+)?import\b(?:[^(\n]*\([^)]*\)|[^(\n]*))", re.MULTILINE)
"""A line that begins as an import does, to the end of its parentheses; no line has two statements (ruff's E70)"""

STRATEGY_MAY = {"backends", "decoding", "errors", "reference", "stats"}


def part_of(path: Path) -> str:
    """The module or sub-package that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "minillm" if first == "__init__" else first


def imports(path: Path) -> set[str]:
    """The parts of minillm that a file imports, wherever in it."""
    package = ["minillm", *path.relative_to(PACKAGE).parts[:-1]]
    found: set[str] = set()
    for node in ast.parse("\n".join(STATEMENT.findall(path.read_text(encoding="utf-8")))).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [stem] if stem.count(".") else [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] if "." in name else name for name in names if name.split(".")[0] == "minillm"}
    return {name if name in ALLOWED else "minillm" for name in found}  # a name like __version__ is the package's


@cache
def edges() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        graph.setdefault(part_of(path), set()).update(imports(path) - {part_of(path)})
    return graph


def test_every_part_is_in_the_table_and_the_table_names_no_other() -> None:
    assert set(edges()) == set(ALLOWED)


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_what_the_table_allows(part: str) -> None:
    assert edges()[part] <= ALLOWED[part]


def test_the_table_allows_nothing_that_is_not_used() -> None:
    unused = {part: ALLOWED[part] - used for part, used in edges().items() if ALLOWED[part] - used}
    assert not unused


def test_there_is_no_cycle() -> None:
    graph, done = {part: set(used) for part, used in edges().items()}, set()
    for part in ("cli", "server"):
        graph[part].discard("minillm")  # __version__ alone
    while graph.keys() - done:
        ready = {part for part in graph.keys() - done if graph[part] <= done}
        assert ready, f"a cycle among {sorted(graph.keys() - done)}"
        done |= ready


@pytest.mark.parametrize("name", ["strategy", "sampling", "beam"])
def test_a_strategy_knows_no_model_cache_or_runner(name: str) -> None:
    assert imports(PACKAGE / "decoding" / f"{name}.py") <= STRATEGY_MAY


def test_imports_are_found_in_every_form(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "models" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "from ..cache import A\nfrom .. import engine\nfrom . import opt\ndef f():\n  import minillm.cli.main\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert imports(path) == {"cache", "engine", "models", "cli"}


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
        ("import minillm; minillm.GenerationConfig; minillm.Engine", {"numpy"}),
        (f"{HELP}\ntry:\n    build_parser().parse_args(['generate', '--help'])\nexcept SystemExit: pass", set()),
    ],
    ids=["Engine", "command line"],
)
def test_importing_loads_nothing_heavy(code: str, loaded: set[str]) -> None:
    assert loaded_after(code) <= loaded
