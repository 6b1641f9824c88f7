"""A changed, new or removed kernel makes its exhaustive tests due; nothing else does. Tests that CI leaves out."""

import json
from pathlib import Path

import pytest

from .exhaustive import (
    EMULATED,
    PASSED,
    ROOT,
    RUN_BY_THEM,
    SINGLE_KERNELS,
    SUBJECTS,
    digest,
    digest_of_all,
    due,
    left_out,
)


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


@pytest.mark.parametrize("changed", [None, *RUN_BY_THEM])
def test_slow_tests_of_single_kernels_are_left_out_if_nothing_they_run_has_changed(
    tmp_path: Path, changed: str | None
) -> None:
    for folder in RUN_BY_THEM:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("one")
    passed = tmp_path / "passed.json"
    passed.write_text(json.dumps({EMULATED: digest_of_all(tmp_path)}))
    (tmp_path / RUN_BY_THEM[0] / "a.cpython-311.pyc").write_text("bytecode")
    if changed:
        (tmp_path / changed / "a.py").write_text("other")
    assert len(left_out(tmp_path, passed)) == (0 if changed else len(SINGLE_KERNELS))
    passed.write_text("{}")
    assert not left_out(tmp_path, passed), "it was never noted"


def test_the_tables_name_folders_and_files_that_there_are() -> None:
    assert all((ROOT / folder).is_dir() for folder in (*SUBJECTS, *SUBJECTS.values(), *RUN_BY_THEM))
    assert all((ROOT / EMULATED / f"test_{name}.py").is_file() for name in SINGLE_KERNELS)
    assert set(json.loads(PASSED.read_text())) - {EMULATED} == set(SUBJECTS.values())
