"""Build wheels that have the C kernels inside, compiled for each system by the Python package ziglang.

    python scripts/build_wheels.py                           all of TARGETS, into dist/
    python scripts/build_wheels.py manylinux-x86_64          one; its name, the last part of a file's, is in --help
    python scripts/build_wheels.py --libraries FOLDER NAME   only the libraries, for tests

It needs `pip install hatchling ziglang`, and no other compiler, whatever the system. A wheel has the package as the
checkout is, and in `minillm/kernels/prebuilt` a library for each level of the system's processors (`LEVELS` in
`minillm/backends/cpu/prebuilt.py`). They are called through ctypes: a wheel fits every Python 3. What has been compiled
once is in zig's cache.
"""

import argparse
import base64
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from minillm.backends.cpu import prebuilt  # noqa: E402
from minillm.backends.cpu.compiling import FLAGS, SOURCES  # noqa: E402

INSIDE = "minillm/kernels/prebuilt"
PROCESSORS = {
    "x86-64-v2": "x86_64_v2",
    "x86-64-v3": "x86_64_v3",
    "x86-64-v4": "x86_64_v4",
    "x86-64-v4-vnni": "x86_64_v4+avx512vnni",
    "armv8": "generic",
    "armv8-dotprod": "generic+dotprod",
    "armv8-i8mm": "generic+dotprod+i8mm",
}
"""Level -> the processor in zig's words"""


@dataclass(frozen=True)
class Target:
    """A system that a wheel is for: zig's name, `sys.platform`'s, the tag of its wheels, and its levels."""

    zig: str
    system: str
    tag: str
    levels: tuple[str, ...]


X86, ARM = prebuilt.LEVELS["x86_64"], prebuilt.LEVELS["aarch64"]
TARGETS = {
    "manylinux-x86_64": Target("x86_64-linux-gnu.2.28", "linux", "manylinux_2_28_x86_64", X86),
    "manylinux-aarch64": Target("aarch64-linux-gnu.2.28", "linux", "manylinux_2_28_aarch64", ARM),
    "musllinux-x86_64": Target("x86_64-linux-musl", "linux", "musllinux_1_2_x86_64", X86),
    "musllinux-aarch64": Target("aarch64-linux-musl", "linux", "musllinux_1_2_aarch64", ARM),
    "macosx-arm64": Target("aarch64-macos.11.0", "darwin", "macosx_11_0_arm64", ARM[1:]),
    "macosx-x86_64": Target("x86_64-macos.11.0", "darwin", "macosx_11_0_x86_64", X86[:2]),
    "win-amd64": Target("x86_64-windows-gnu", "win32", "win_amd64", X86),
}


def main() -> None:
    """Build the wheels, or only the libraries, of the targets that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="NAME", help=f"of {', '.join(TARGETS)}; all if none is named")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--libraries", type=Path, metavar="FOLDER", help="write the libraries there, and no wheels")
    parser.add_argument("--levels", nargs="+", help="of the levels only these")
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: the number of cores)")
    options = parser.parse_args()
    if unknown := [name for name in options.targets if name not in TARGETS]:
        parser.error(f"no target is called {unknown[0]}: expected {', '.join(TARGETS)}")
    for name in options.targets or TARGETS:
        target = TARGETS[name]
        levels = [level for level in target.levels if not options.levels or level in options.levels]
        if options.libraries:
            libraries = compile_libraries(target, levels, options.libraries, options.jobs)
            print(*libraries, sep="\n")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            libraries = compile_libraries(target, levels, Path(scratch), options.jobs)
            wheel = add_libraries(build_wheel(Path(scratch)), libraries, target.tag, options.out)
        print(f"{wheel} ({wheel.stat().st_size / 1e6:.2f} MB)")


def compile_libraries(target: Target, levels: list[str], folder: Path, jobs: int | None = None) -> list[Path]:
    """Compile the kernels for a system, a library for each level. -> their paths, in `folder`"""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        calls, objects = [], {}
        for level in levels:
            objects[level] = [Path(scratch, f"{level}-{source.stem}.o") for source in sorted(SOURCES.glob("*.c"))]
            for source, compiled in zip(sorted(SOURCES.glob("*.c")), objects[level], strict=True):
                flags = [*FLAGS, "-Werror", f"-mcpu={PROCESSORS[level]}"]
                calls.append([*flags, "-c", source.name, "-o", str(compiled)])
        list(pool.map(lambda arguments: _zig(target, arguments), calls))
        libraries = [folder / prebuilt.file_name(level, target.system, SOURCES) for level in levels]
        for level, library in zip(levels, libraries, strict=True):  # without -mcpu: one C runtime for all of them
            linked = Path(scratch, library.name)  # beside it Windows' linker leaves lists of symbols
            _zig(target, ["-shared", "-s", "-pthread", *map(str, objects[level]), "-o", str(linked), "-lm"])
            shutil.copy(linked, library)
    return libraries


def _zig(target: Target, arguments: list[str]) -> None:
    """Run zig's C compiler among the sources, for a system."""
    flags = [argument for argument in arguments if argument != "-fPIC" or target.system != "win32"]
    subprocess.run([sys.executable, "-m", "ziglang", "cc", "-target", target.zig, *flags], cwd=SOURCES, check=True)


def build_wheel(folder: Path) -> Path:
    """Build the wheel without libraries. -> its path, in `folder`"""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def add_libraries(wheel: Path, libraries: list[Path], tag: str, folder: Path) -> Path:
    """Write a wheel for one system: another wheel's files, libraries, and the tag in its name and metadata.

    Source: https://packaging.python.org/en/latest/specifications/binary-distribution-format/
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / wheel.name.replace("-any.whl", f"-{tag}.whl")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        entries = {info: old.read(info) for info in old.infolist() if not info.filename.endswith("/RECORD")}
        (record,) = (info for info in old.infolist() if info.filename.endswith("/RECORD"))
        for info in entries:
            if info.filename.endswith(".dist-info/WHEEL"):
                text = entries[info].decode().replace("Tag: py3-none-any", f"Tag: py3-none-{tag}")
                entries[info] = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode()
        for library in libraries:
            info = zipfile.ZipInfo(f"{INSIDE}/{library.name}", record.date_time)
            info.external_attr, info.compress_type = 0o100755 << 16, zipfile.ZIP_DEFLATED
            entries[info] = library.read_bytes()
        lines = [f"{info.filename},sha256={_digest(content)},{len(content)}\n" for info, content in entries.items()]
        entries[record] = "".join([*lines, f"{record.filename},,\n"]).encode()
        for info, content in entries.items():
            new.writestr(info, content)
    return path


def _digest(content: bytes) -> str:
    """The SHA-256 of a file as RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    main()
