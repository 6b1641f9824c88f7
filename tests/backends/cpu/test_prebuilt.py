"""The libraries of kernels that a wheel brings: which is chosen, when it is used, and when the kernels are compiled.

`tests/scripts/test_build_wheels.py` has the real ones.
"""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.backends.cpu import compiling, prebuilt

from . import emulated

pytestmark = pytest.mark.skipif(not compiling.compilers(), reason="needs a C compiler")
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names levels of x86")

NAMES = prebuilt.LEVELS["x86_64"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """The folder of libraries of an installed package, whose sources say which number they give: 7."""
    sources, folder = tmp_path / "sources", tmp_path / "prebuilt"
    sources.mkdir()
    folder.mkdir()
    (sources / "number.c").write_text("int number(void) { return 7; }\n")
    monkeypatch.setattr(compiling, "SOURCES", sources)
    monkeypatch.setattr(compiling, "_test", lambda library, compiler: None)
    monkeypatch.setattr(compiling, "_failure", lambda library: None)
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setattr(prebuilt, "LEVELS", {platform.machine(): NAMES})
    monkeypatch.setattr(compiling, "_load", compiling._load.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CC", "MINILLM_MARCH", "MINILLM_COMPILE"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level("INFO", "minillm.kernels")
    return folder


def add_library(level: str, number: int, processor_level: int = 1) -> Path:
    """Compile a library into the package: its `number` tells it from others."""
    path = prebuilt.FOLDER / prebuilt.file_name(level, prebuilt.sys.platform, compiling.SOURCES)
    source = path.with_suffix(".c")
    source.write_text(
        f"int number(void) {{ return {number}; }}\nlong processor_level(void) {{ return {processor_level}; }}"
    )
    command = [*compiling.compilers()[0], "-shared", "-fPIC", str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


@pytest.mark.parametrize(("level", "expected"), enumerate([None, *NAMES]))
def test_each_processor_has_the_last_library_that_it_runs(level: int, expected: str | None, package, monkeypatch):
    for name in NAMES:
        (package / prebuilt.file_name(name, prebuilt.sys.platform, compiling.SOURCES)).touch()
    monkeypatch.setattr(prebuilt, "_level", lambda lowest: level)
    chosen = prebuilt.library(compiling.SOURCES)
    assert chosen is None if expected is None else chosen and chosen.name.startswith(f"{expected}-")


def test_where_a_level_is_missing_it_is_the_one_below(package, monkeypatch) -> None:
    for name in (NAMES[0], NAMES[2]):
        (package / prebuilt.file_name(name, prebuilt.sys.platform, compiling.SOURCES)).touch()
    for level, expected in ((1, NAMES[0]), (2, NAMES[0]), (3, NAMES[2]), (4, NAMES[2])):
        monkeypatch.setattr(prebuilt, "_level", lambda lowest, level=level: level)
        chosen = prebuilt.library(compiling.SOURCES)
        assert chosen and chosen.name.startswith(f"{expected}-")


def test_the_library_of_the_package_needs_no_compiler_and_is_tested_once(package, monkeypatch, caplog) -> None:
    add_library(NAMES[0], 20, 2)
    library = add_library(NAMES[1], 30)
    add_library(NAMES[2], 40)
    tested: list[Path] = []
    monkeypatch.setattr(compiling, "_failure", tested.append)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda _: None)
    assert compiling.available()
    assert [compiling.load().number() for _ in range(3)] == [30, 30, 30]
    assert [path.name.partition("-v")[2][0] for path in tested] == ["3"]
    assert not caplog.messages
    content = library.read_bytes() + b"\0"  # another file, such as the next version's, is tested again
    library.unlink()
    library.write_bytes(content)
    compiling.load()
    assert len(tested) == 2


def test_one_that_fails_its_test_gives_way_to_a_compiler(package, monkeypatch, caplog) -> None:
    add_library(NAMES[0], 20)
    monkeypatch.setattr(compiling, "_failure", lambda library: "the process died of SIGILL")
    assert compiling.load().number() == 7
    assert "the wheel's kernels are not used: " in caplog.text and "died of SIGILL" in caplog.text
    assert not list(package.parent.rglob("*.passed"))


@pytest.mark.parametrize(
    "environment", [{"MINILLM_COMPILE": "1"}, pytest.param({"MINILLM_MARCH": "x86-64-v2"}, marks=needs_x86)]
)
def test_the_user_can_ask_for_kernels_compiled_here(environment: dict[str, str], package, monkeypatch) -> None:
    add_library(NAMES[0], 20)
    assert compiling.load().number() == 20
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert compiling.load().number() == 7


def test_changed_sources_are_compiled(package) -> None:
    add_library(NAMES[0], 20)
    (compiling.SOURCES / "number.c").write_text("int number(void) { return 8; }\n")
    assert compiling.load().number() == 8


def test_lines_that_end_as_on_windows_are_the_same_sources(package) -> None:
    before = prebuilt.digest(compiling.SOURCES)
    (compiling.SOURCES / "number.c").write_bytes(b"int number(void) { return 7; }\r\n")
    assert prebuilt.digest(compiling.SOURCES) == before


# --- what the processor says ------------------------------------------------------------------------------------------

FLAGS = [  # of /proc/cpuinfo, in Linux's words: of the first level, and what each next one has more
    set(),
    {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"},
    {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"},
    {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"},
    {"avx512_vnni"},
]
PROCESSORS = {"core2duo": 0, "Nehalem": 1, "SandyBridge": 1, "Haswell": 2}
"""QEMU's, which emulates no AVX-512 -> level"""
MAIN = "#include <stdint.h>\nint64_t processor_level(void);\nint main(void) { return (int)processor_level(); }\n"
ARM_PROCESSORS = {"cortex-a72": 1, "neoverse-n1": 2, "max": 3}


@needs_x86
def test_the_level_is_what_linux_says_that_this_processor_has() -> None:
    line = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    flags = set(line.split())
    level = next((i for i, more in enumerate(FLAGS) if not more <= flags), len(FLAGS)) - 1
    assert compiling.load().processor_level() == level


@needs_x86
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-x86_64-static") is None, reason="needs apt install qemu-user-static")
def test_processors_of_other_levels_say_so(tmp_path: Path) -> None:
    program = tmp_path / "level"
    (tmp_path / "main.c").write_text(MAIN)
    source = compiling.SOURCES / "processor.c"
    subprocess.run(["cc", "-static", str(source), str(tmp_path / "main.c"), "-o", str(program)], check=True)
    for processor, level in PROCESSORS.items():
        done = subprocess.run(["qemu-x86_64-static", "-cpu", processor, str(program)], stderr=subprocess.DEVNULL)
        assert done.returncode == level, processor


@pytest.mark.slow
@pytest.mark.skipif(emulated.missing() is not None, reason=emulated.missing() or "")
def test_processors_of_aarch64_say_their_level(tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text(MAIN)
    target = ["-target", "aarch64-linux-musl", "-static", str(compiling.SOURCES / "processor.c")]
    program = str(tmp_path / "level")
    subprocess.run(
        [sys.executable, "-m", "ziglang", "cc", *target, str(tmp_path / "main.c"), "-o", program], check=True
    )
    for processor, level in ARM_PROCESSORS.items():
        assert subprocess.run(["qemu-aarch64-static", "-cpu", processor, program]).returncode == level, processor
