"""Exhaustive tests of kernels are due when the kernels have changed since these tests last passed.

    python -m tests.exhaustive             print the test folders that are due; CI runs these
    python -m tests.exhaustive --passed    note in exhaustive.json that all pass with the kernels as they are

The other exhaustive tests, families' further configurations among them, are run by hand, before a release: `pytest -m
exhaustive`.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[1]
PASSED = Path(__file__).with_suffix(".json")
SUBJECTS = {"tests/backends/cpu": "kernels/cpu", "tests/backends/cuda": "kernels/cuda"}
"""Folder of tests -> folder of the files they test"""


def digest(folder: Path) -> str:
    """SHA-256 of the names and contents of a folder's files."""
    total = sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(f"{path.relative_to(folder).as_posix()}\0{sha256(path.read_bytes()).hexdigest()}\0".encode())
    return total.hexdigest()


def due(root: Path = ROOT, passed: Path = PASSED) -> list[str]:
    """The test folders whose subject is not the one with which they last passed."""
    known = json.loads(passed.read_text(encoding="utf-8"))
    return [tests for tests, subject in SUBJECTS.items() if known.get(subject) != digest(root / subject)]


if __name__ == "__main__":
    if sys.argv[1:] == ["--passed"]:
        digests = {subject: digest(ROOT / subject) for subject in SUBJECTS.values()}
        PASSED.write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
    else:
        print(*due(), sep="\n")
