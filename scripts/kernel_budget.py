"""Compile every kernel for every architecture and record its registers and static shared memory.

    python scripts/kernel_budget.py            write tests/backends/cuda/budget.csv anew
    python scripts/kernel_budget.py --check    only report differences

The table shows in a review what a change to a kernel costs. It needs CuPy and NVRTC (the extra cuda13), but no GPU.
Spilled registers have no budget: a kernel that spills is refused.
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from minillm.backends.cuda.compiling import compile_for  # noqa: E402
from minillm.backends.cuda.kernels import STORAGE, kernel_folder  # noqa: E402
from minillm.errors import DeviceError  # noqa: E402
from tests.backends.cuda.builds import BUILDS, STORAGES  # noqa: E402

ARCHITECTURES = ("80", "90", "120")
TABLE = ROOT / "tests" / "backends" / "cuda" / "budget.csv"
# One kernel in the report of ptxas -v. Spills stand before the registers, shared memory after them, if there is any.
USE = re.compile(
    r"entry function '(?P<kernel>\w+)' for .*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True, order=True)
class Build:
    """A module with its constants, for one architecture."""

    module: str
    constants: str  # NAME=VALUE, separated by spaces
    storage: str
    arch: str

    @property
    def options(self) -> tuple[str, ...]:
        """The macros."""
        return (f"-DMINILLM_STORAGE={STORAGE[self.storage]}", *(f"-D{constant}" for constant in self.constants.split()))

    @property
    def path(self) -> Path:
        """The source."""
        return kernel_folder() / f"{self.module}.cu"


@dataclass(frozen=True, order=True)
class Use:
    """Resources of one kernel of a build."""

    module: str
    constants: str
    storage: str
    arch: str
    kernel: str
    registers: int
    shared: int  # bytes of static shared memory
    spilled: int = 0  # bytes, stores and loads


def builds() -> Iterator[Build]:
    """Every module with all its constants, storage types and architectures."""
    for path in sorted(kernel_folder().glob("*.cu")):
        for constants in BUILDS.get(path.stem, [{}]):
            macros = {name: value for name, value in constants.items() if name not in ("storage", "arch")}
            text = " ".join(f"{name}={value}" for name, value in sorted(macros.items()))
            for storage in constants.get("storage", STORAGES):
                for arch in constants.get("arch", ARCHITECTURES):
                    yield Build(path.stem, text, storage, arch)


def measure(build: Build) -> list[Use]:
    """Compile one build."""
    _, report = compile_for(build.arch, build.path, build.options)
    uses = []
    for found in USE.finditer(report):
        shared = re.search(r"(\d+) bytes smem", found["rest"])
        spilled = int(found["stores"]) + int(found["loads"])
        numbers = (int(found["registers"]), int(shared[1]) if shared else 0, spilled)
        uses.append(Use(build.module, build.constants, build.storage, build.arch, found["kernel"], *numbers))
    if not uses:
        raise DeviceError(f"{build}: the compiler reports no kernel")
    return uses


def measure_all() -> list[Use]:
    """Compile every build, on two threads: NVRTC releases the interpreter."""
    first, *others = builds()
    uses = measure(first)  # alone: NVRTC then loads parts of itself, which is not thread-safe
    with ThreadPoolExecutor(2) as pool:
        return sorted(uses + [use for uses in pool.map(measure, others) for use in uses])


def read_table(path: Path = TABLE) -> list[Use]:
    """The checked-in table."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        _, *rows = csv.reader(file)
    return [Use(m, c, s, a, kernel, int(registers), int(shared)) for m, c, s, a, kernel, registers, shared in rows]


def write_table(uses: list[Use], path: Path = TABLE) -> None:
    """Write the table; spills are not in it, for there are none."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Use)][:-1])
        writer.writerows(astuple(use)[:-1] for use in uses)


def differences(measured: list[Use], table: list[Use]) -> list[str]:
    """Differences between the table and the measurement, a line each."""
    now = {astuple(use)[:5]: (use.registers, use.shared) for use in measured}
    then = {astuple(use)[:5]: (use.registers, use.shared) for use in table}
    return [
        f"{' '.join(filter(None, key))}: (registers, shared) {then.get(key)} -> {now.get(key)}"
        for key in sorted(now.keys() | then.keys())
        if now.get(key) != then.get(key)
    ]


def main() -> int:
    """Measure, then compare or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the table is not right")
    only_check = parser.parse_args().check
    try:
        measured = measure_all()
    except DeviceError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    changes = differences(measured, read_table())
    spilling = [
        f"{use.module} {use.kernel} {use.constants} {use.storage} sm_{use.arch} spills {use.spilled} bytes"
        for use in measured
        if use.spilled
    ]
    print("\n".join([*changes, *spilling]) or "nothing has changed")
    if spilling:
        return 1
    if not only_check:
        write_table(measured)
    return int(only_check and bool(changes))


if __name__ == "__main__":
    sys.exit(main())
