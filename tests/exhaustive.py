"""What CI has to run: tests of which something has changed since they last passed.

    python -m tests.exhaustive                      print the test folders whose exhaustive tests are due: the kernels
                                                    that they test have changed. CI runs these
    python -m tests.exhaustive --passed             note in exhaustive.json that all pass with the kernels as they are
    python -m tests.exhaustive --unchanged PATH...  print arguments of pytest that leave out those files of tests at
                                                    these paths of which nothing that they depend on
                                                    (dependencies.py) has changed; the status is 0 if that is all
    python -m tests.exhaustive --all-passed         note that all that CI runs passes with the files as they are, on a
                                                    processor with this one's instruction sets

The default tests run always. The other exhaustive tests, those of CUDA's kernels and families' further configurations
among them, are run by hand, before a release: `pytest -m exhaustive`; then all else runs too: `MINILLM_CI_ALL=1
.ci/run`.
"""

import json
import os
import platform
import sys
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[1]
PASSED = Path(__file__).with_suffix(".json")
SUBJECTS = {"tests/backends/cpu": "kernels/cpu"}
"""Folder of tests -> folder of the files they test. CUDA's take an hour of the emulator and of compiling: by hand"""

LEVELS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "asimddp", "i8mm")
"""Instruction sets, by Linux's names, that decide which kernels run"""


def processor(text: str | None = None) -> str:
    """The name of the digests of all units with which everything has passed on a processor of this kind."""
    if text is None:
        path = Path("/proc/cpuinfo")
        text = path.read_text(encoding="ascii") if path.is_file() else ""
    flags = set(text.split())
    return " ".join(["all on", platform.machine(), *(level for level in LEVELS if level in flags)])


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


def files_at(paths: list[str]) -> list[Path]:
    """The files of tests at some paths from the root."""
    places = [ROOT / path for path in paths]
    if missing := [path for path in places if not path.exists()]:
        sys.exit(f"there is no {missing[0]}")
    return sorted(file for place in places for file in ([place] if place.is_file() else place.rglob("test_*.py")))


def unchanged(paths: list[str], passed: Path = PASSED) -> list[str]:
    """The files of tests at some paths of which all that they depend on is as it was when everything passed."""
    from .dependencies import dependencies, units
    from .dependencies import digest as digest_of

    known = json.loads(passed.read_text(encoding="utf-8")).get(processor(), {})
    changed = {unit for unit in units() if os.environ.get("MINILLM_CI_ALL") or known.get(unit) != digest_of(unit)}
    return [file.relative_to(ROOT).as_posix() for file in files_at(paths) if not dependencies(file) & changed]


def note(digests: dict[str, object]) -> None:
    """Note that tests have passed."""
    known = json.loads(PASSED.read_text(encoding="utf-8"))
    PASSED.write_text(json.dumps(known | digests, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    kernels: dict[str, object] = {subject: digest(ROOT / subject) for subject in SUBJECTS.values()}
    match sys.argv[1:]:
        case []:
            print(*due(), sep="\n")
        case ["--unchanged", *paths]:
            files = unchanged(paths)
            sys.stdout.writelines(f"--ignore={file}\n" for file in files)
            sys.exit(len(files) < len(files_at(paths)))
        case ["--passed"]:
            note(kernels)
        case ["--all-passed"]:
            from .dependencies import digest as digest_of
            from .dependencies import units

            note(kernels | {processor(): {unit: digest_of(unit) for unit in units()}})
        case _:
            sys.exit(__doc__)
