"""A changed, new or removed kernel makes its exhaustive tests due; nothing else does."""

import json
from pathlib import Path

import pytest

from .exhaustive import PASSED, ROOT, SUBJECTS, digest, due


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


def test_the_table_names_folders_that_there_are() -> None:
    assert all((ROOT / folder).is_dir() for pair in SUBJECTS.items() for folder in pair)
    assert set(json.loads(PASSED.read_text())) == set(SUBJECTS.values())
