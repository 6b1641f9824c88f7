"""Which tests a run has: by what has changed since they passed, and by marks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import dependencies
from .conftest import left_out
from .exhaustive import PASSED, ROOT, SUBJECTS, digest, due, processor, unchanged


@pytest.mark.parametrize("change", ["none", "content", "new file", "removed file", "renamed file"])
def test_what_is_due_after_a_change(tmp_path: Path, change: str) -> None:
    for subject in SUBJECTS.values():
        (tmp_path / subject / "inner").mkdir(parents=True)
        (tmp_path / subject / "a.c").write_text("one")
        (tmp_path / subject / "inner" / "b.h").write_text("two")
    passed = tmp_path / "passed.json"
    passed.write_text(json.dumps({subject: digest(tmp_path / subject) for subject in SUBJECTS.values()}))
    file = tmp_path / "kernels" / "cpu" / "a.c"
    if change == "content":
        file.write_text("other")
    elif change == "new file":
        file.with_name("c.c").write_text("")
    elif change == "removed file":
        file.unlink()
    elif change == "renamed file":
        file.rename(file.with_name("c.c"))
    assert due(tmp_path, passed) == ([] if change == "none" else ["tests/backends/cpu"])


HOSTILE, ATTENTION, SERVING = (
    "tests/text/test_chat_hostile.py",
    "tests/backends/cpu/test_attention.py",
    "tests/cli/test_serve.py",
)
EMULATED, PAGE = "tests/backends/cuda/test_families.py", "tests/test_readme.py"


@pytest.mark.longer
@pytest.mark.parametrize(
    ("unit", "again"),
    [
        (None, set()),
        ("minillm/server", {SERVING, PAGE}),
        ("minillm/engine", {HOSTILE, SERVING, EMULATED, PAGE}),
        ("minillm/reference", {HOSTILE, SERVING, EMULATED, PAGE, ATTENTION}),
        ("kernels/cpu", {HOSTILE, SERVING, EMULATED, PAGE, ATTENTION}),
        ("kernels/cuda", {EMULATED, PAGE}),
        ("tests/models", {EMULATED, PAGE}),
        ("tests/text", {HOSTILE}),
        (dependencies.PAGES, {PAGE}),
        ("pyproject.toml", {HOSTILE, SERVING, EMULATED, PAGE, ATTENTION}),
    ],
)
def test_what_depends_on_a_change_is_run_again(
    unit: str | None, again: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = tmp_path / "passed.json"
    digests = {name: dependencies.digest(name) for name in dependencies.units()}
    passed.write_text(json.dumps({processor(): digests | ({unit: "other"} if unit else {})}))
    files = {HOSTILE, ATTENTION, SERVING, EMULATED, PAGE}
    assert set(unchanged(sorted(files), passed)) == files - again
    monkeypatch.setenv("MINILLM_CI_ALL", "1")
    assert not unchanged(sorted(files), passed)
    monkeypatch.delenv("MINILLM_CI_ALL")
    passed.write_text(json.dumps({processor("avx2 avx512f"): digests, processor("asimd"): digests}))
    assert not unchanged(sorted(files), passed), "it was never noted on this processor"


@pytest.mark.longer
def test_every_file_belongs_to_a_unit() -> None:
    known = {file for unit in dependencies.units() for file in dependencies.files_of(unit)}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    names = {ROOT / name for name in tracked if name and name[0] != "." and (ROOT / name).is_file()}
    assert names - known <= {
        PASSED,
        *(name for name in names if name.is_relative_to(ROOT / "tests") and name.suffix == ".md"),
    }


RECORD = """
import os, sys
opened = set()
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        opened.add(os.path.abspath(arguments[0]))
import pytest
import tests.conftest
before = set(sys.modules)
sys.addaudithook(watch)
status = pytest.main(["-p", "no:cacheprovider", "-n", "0", *sys.argv[1:]])
new = [module for name, module in list(sys.modules.items()) if name not in before]
opened |= {str(module.__file__) for module in new if getattr(module, "__file__", None)}
print("=", *sorted(opened), sep="\\n")
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("tests/fuzz/test_fuzz.py", "minillm/engine"),  # by a process of a module of its folder
        ("tests/backends/cuda/test_cupy.py", "tests/cupy_standin"),  # by import_module
        ("tests/scripts/test_demo_card.py", "scripts"),  # whose folder is on the path
        ("tests/backends/cuda/test_compile.py", "tests/backends/cuda"),  # which has the budget
        ("tests/text/test_tokenizer_gguf.py", "tests/real"),
    ],
)
def test_dependencies_that_no_import_shows(path: str, unit: str) -> None:
    assert unit in dependencies.dependencies(dependencies.ROOT / path)
    assert dependencies.ROOT / "tests/backends/cuda/budget.csv" in dependencies.files_of("tests/backends/cuda")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        HOSTILE,
        "tests/decoding/test_beam.py",
        ATTENTION,
        "tests/formats/test_safetensors.py",
        "tests/cache/test_paged.py",
        "tests/tasks/test_reranking.py",
    ],
)
def test_a_file_of_tests_opens_and_imports_only_what_it_depends_on(path: str) -> None:
    """But for what tests/conftest.py imports for all, which the default tests run."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RECORD, path]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    names = done.stdout.partition("\n=\n")[2].splitlines()
    files = {file for name in names if (file := Path(name)).is_relative_to(ROOT) and file.is_file()}
    files = {file for file in files if "__pycache__" not in file.parts and not file.name.startswith("test_")}
    known = {file for unit in dependencies.dependencies(ROOT / path) for file in dependencies.files_of(unit)}
    assert len(files) > 2
    assert files <= known, sorted(files - known)


def test_the_tables_name_folders_that_there_are() -> None:
    assert all((ROOT / folder).is_dir() for folder in (*SUBJECTS, *SUBJECTS.values()))
    names = set(json.loads(PASSED.read_text()))
    assert {name for name in names if not name.startswith("all on ")} == set(SUBJECTS.values())


@pytest.mark.parametrize(
    ("expression", "marks"),
    [
        ("not slow and not real", {"slow", "real"}),
        ("longer and not slow and not real", {"slow", "real"}),
        ("(slow or reference) and not real and not exhaustive", {"real", "exhaustive"}),
        ("(unsampled or not slow) and not real", {"real"}),
        ("slow and not exhaustive", {"exhaustive"}),
        ("not (slow or real)", set()),
        ("(slow and not (real or reference)) or not exhaustive", set()),
        ("slow or not slow", set()),
        ("", set()),
    ],
)
def test_a_run_makes_no_cases_of_what_it_leaves_out_whatever_other_marks_it_has(
    expression: str, marks: set[str]
) -> None:
    assert left_out(expression) == marks
