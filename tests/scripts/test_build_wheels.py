"""Wheels with compiled kernels: what is in one, that they run without a compiler, and what each needs of its system."""

import base64
import hashlib
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import build_wheels
import pytest

from minillm.backends.cpu import compiling, prebuilt

from ..backends.cpu import emulated
from .binaries import read

X86_LINUX = build_wheels.TARGETS["manylinux-x86_64"]
needs_zig = pytest.mark.skipif(
    compiling.importlib.util.find_spec("ziglang") is None, reason="needs pip install ziglang"
)
UCRT = ("heap", "math", "private", "runtime", "stdio", "string", "utility")
"""Parts of the C runtime of Windows 10"""
NEEDED = {
    "manylinux": {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-aarch64.so.1"},
    "musllinux": {"libc.so"},  # musl's own name for itself
    "macosx": {"/usr/lib/libSystem.B.dylib"},
    "win": {"kernel32.dll"} | {f"api-ms-win-crt-{part}-l1-1-0.dll" for part in UCRT},
}
"""First part of a target's name -> libraries of the system, which its kernels may need"""

FUNCTIONS = {"run_program", "attention", "linear_few", "linear_many", "sample", "processor_level"}
"""Some that every library must have"""


def test_a_wheel_for_a_system_is_the_other_wheel_with_libraries(tmp_path: Path) -> None:
    plain, library = tmp_path / "minillm_engine-1.0-py3-none-any.whl", tmp_path / "x86-64-v2-0.so"
    library.write_bytes(b"\x7fELF")
    files = {
        "minillm/__init__.py": "",
        "minillm_engine-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "minillm_engine-1.0.dist-info/RECORD": "of the plain wheel",
    }
    with zipfile.ZipFile(plain, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    path = build_wheels.add_libraries(plain, [library], "manylinux_2_28_x86_64", tmp_path / "dist")
    assert path.name == "minillm_engine-1.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    assert set(content) == {*files, "minillm/kernels/prebuilt/x86-64-v2-0.so"}
    expected = b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-manylinux_2_28_x86_64\n"
    assert content["minillm_engine-1.0.dist-info/WHEEL"] == expected
    rows = [line.split(",") for line in content["minillm_engine-1.0.dist-info/RECORD"].decode().splitlines()]
    assert {name for name, _, _ in rows} == set(content)
    for name, digest, size in rows[:-1]:
        assert int(size) == len(content[name])
        value = base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "=")
        assert value == hashlib.sha256(content[name]).digest()


FIRST = """
from minillm import Engine
from minillm.backends.cpu.compiling import compilers, load
assert compilers() == []
with Engine() as engine:
    print(engine.runner.backend.name, engine.generate("A list of colors: red,", max_new_tokens=4).text)
print(load()._name)
"""


@pytest.mark.slow
@needs_zig
@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="runs a library for x86-64 Linux")
def test_a_wheel_runs_the_kernels_where_there_is_no_compiler(tmp_path: Path) -> None:
    """Of one level, which every processor runs that NumPy's wheels do."""
    libraries = build_wheels.compile_libraries(X86_LINUX, ["x86-64-v2"], tmp_path / "libraries", jobs=1)
    library = read(libraries[0].read_bytes())
    assert library.exported >= FUNCTIONS
    assert tuple(map(int, library.oldest.split("."))) <= (2, 28)
    wheel = build_wheels.add_libraries(build_wheels.build_wheel(tmp_path), libraries, X86_LINUX.tag, tmp_path / "dist")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    dependencies = "import sys; sys.modules['ziglang'] = None\n"  # find_spec finds none then
    environment = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", dependencies + FIRST], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "cpu  orange, yellow,"
    assert done.stdout.splitlines()[1] == str(site / "minillm" / "kernels" / "prebuilt" / libraries[0].name)
    assert not done.stderr
    assert len(list((tmp_path / "cache").rglob("*.passed"))) == 1


TESTED = ["test_linear.py", "test_rows.py", "test_attention.py", "test_blocks.py", "test_sample.py"]


@pytest.mark.exhaustive
@needs_zig
@pytest.mark.parametrize("name", build_wheels.TARGETS)
def test_libraries_need_nothing_but_the_system_and_pass_the_kernels_tests(name: str, tmp_path: Path) -> None:
    """The tests only of those that this processor or an emulator runs."""
    target = build_wheels.TARGETS[name]
    paths = build_wheels.compile_libraries(target, list(target.levels), tmp_path)
    kernels = compiling.load()
    for path in paths:
        library = read(path.read_bytes())
        assert library.machine == target.zig.partition("-")[0]
        assert library.needed <= NEEDED[name.partition("-")[0]], path
        assert library.exported >= FUNCTIONS and all(hasattr(kernels, function) for function in FUNCTIONS)
        if target.system == "darwin":
            assert library.oldest == "11.0"
            assert library.signed or library.machine != "aarch64"  # Apple's processors run nothing that is not
    for path in paths:
        if name == "manylinux-x86_64" and target.levels.index(path.name[: path.name.rindex("-")]) < own_level():
            run_kernel_tests(MINILLM_TEST_LIBRARY=str(path))
        if name == "manylinux-aarch64" and emulated.missing() is None:
            program = emulated.build("aarch64:generic", tmp_path, path)
            run_kernel_tests(MINILLM_TEST_TARGET="aarch64:generic", MINILLM_TEST_PROGRAM=str(program))


def own_level() -> int:
    """How many of the levels of x86-64 Linux this machine runs."""
    here = (sys.platform, platform.machine()) == ("linux", "x86_64")
    return int(compiling.load().processor_level()) if here else 0


def run_kernel_tests(**environment: str) -> None:
    """Run the tests of single kernels in a process with these variables."""
    environment |= {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    options = ["-n", "0", "-x", "-p", "no:cacheprovider", "-k", "not tangent"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *TESTED],
        env=environment,
        cwd=Path(emulated.__file__).parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_every_level_has_a_processor_that_zig_knows() -> None:
    levels = {level for target in build_wheels.TARGETS.values() for level in target.levels}
    assert levels == set(build_wheels.PROCESSORS) == {level for each in prebuilt.LEVELS.values() for level in each}
