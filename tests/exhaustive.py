"""Exhaustive tests of kernels are due when the kernels have changed since these tests last passed.

    python -m tests.exhaustive                  print the test folders that are due; CI runs these
    python -m tests.exhaustive --passed         note in exhaustive.json that all pass with the kernels as they are
    python -m tests.exhaustive --unchanged      print what leaves out, in a run of slow tests, those of single kernels
                                                on the emulated GPU, if all that they run is as when they last passed
    python -m tests.exhaustive --slow-passed    note that these pass with what they run as it is

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


EMULATED = "tests/backends/cuda"
SINGLE_KERNELS = [
    "attention",
    "convolution",
    "delta_rule",
    "dependent",
    "emulator",
    "emulator_launch",
    "experts",
    "fusing",
    "integers",
    "kv",
    "linear",
    "low_rank",
    "products",
    "random",
    "rotary",
    "rows",
    "sampling",
    "selective_scan",
]
"""Tests of kernels by themselves: what runs whole models is beside them, and runs every time"""
RUN_BY_THEM = ("kernels/cuda", "minillm/backends/cuda", "minillm/reference", EMULATED)


def digest(folder: Path) -> str:
    """SHA-256 of the names and contents of a folder's files, without bytecode and tables."""
    total = sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".csv")):
        total.update(f"{path.relative_to(folder).as_posix()}\0{sha256(path.read_bytes()).hexdigest()}\0".encode())
    return total.hexdigest()


def due(root: Path = ROOT, passed: Path = PASSED) -> list[str]:
    """The test folders whose subject is not the one with which they last passed."""
    known = json.loads(passed.read_text(encoding="utf-8"))
    return [tests for tests, subject in SUBJECTS.items() if known.get(subject) != digest(root / subject)]


def digest_of_all(root: Path = ROOT) -> str:
    """That of what the slow tests of single kernels run."""
    return sha256("".join(digest(root / folder) for folder in RUN_BY_THEM).encode()).hexdigest()


def left_out(root: Path = ROOT, passed: Path = PASSED) -> list[str]:
    """Arguments of pytest that leave out slow tests of which nothing has changed since they passed."""
    if json.loads(passed.read_text(encoding="utf-8")).get(EMULATED) != digest_of_all(root):
        return []
    return [f"--ignore={EMULATED}/test_{name}.py" for name in SINGLE_KERNELS]


def note(digests: dict[str, str]) -> None:
    """Note that tests have passed."""
    known = json.loads(PASSED.read_text(encoding="utf-8"))
    PASSED.write_text(json.dumps(known | digests, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--passed"]:
        note({subject: digest(ROOT / subject) for subject in SUBJECTS.values()})
    elif sys.argv[1:] == ["--slow-passed"]:
        note({EMULATED: digest_of_all()})
    else:
        print(*(left_out() if sys.argv[1:] == ["--unchanged"] else due()), sep="\n")
