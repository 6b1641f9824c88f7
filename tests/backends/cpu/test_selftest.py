"""The test of a fresh build: it passes, and it fails for a compiler or a target that is wrong."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.backends.cpu import compiling
from minillm.errors import DeviceError

pytestmark = pytest.mark.skipif(not compiling.compilers(), reason="needs a C compiler")


def avx512() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return not cpuinfo.exists() or "avx512f" in cpuinfo.read_text()


CHOICE = """
from minillm.backends.placement import Placement, choose_backend
from minillm.errors import DeviceError
print(choose_backend(Placement(), 4).name)
try:
    choose_backend(Placement(backend="cpu"), 4)
except DeviceError as error:
    print(error)
"""


def choice(tmp_path: Path, **environment: str) -> tuple[str, str, list[str]]:
    """In a new process with an empty cache: the backend of "auto", the error of "cpu", the lines on stderr."""
    environment = {"MINILLM_BACKEND": "", "XDG_CACHE_HOME": str(tmp_path / "cache")} | environment
    done = subprocess.run(
        [sys.executable, "-c", CHOICE], env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert not list((tmp_path / "cache").rglob("*.so")), "what fails is not kept"
    assert not list(tmp_path.glob("core*"))
    return *done.stdout.strip().split("\n", 1), done.stderr.splitlines()  # type: ignore[return-value]


@pytest.mark.longer
def test_a_good_build_passes() -> None:
    compiling._test(Path(compiling.load()._name), ["cc"])


def test_a_file_that_is_no_library_fails_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINILLM_MARCH", raising=False)
    (tmp_path / "kernels.so").write_text("nothing")
    with pytest.raises(DeviceError, match=r"^the C kernels, compiled by cc -O9, fail their test: OSError: .*too short"):
        compiling._test(tmp_path / "kernels.so", ["cc", "-O9"])


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.machine() != "x86_64" or avx512(), reason="needs an x86-64 CPU without AVX-512")
def test_a_target_above_the_processor_is_one_line_and_auto_runs_on_numpy(tmp_path: Path) -> None:
    auto, error, lines = choice(tmp_path, MINILLM_MARCH="x86-64-v4", CC="cc")
    assert auto != "cpu"
    assert "for x86-64-v4, fail their test: the process died of SIGILL; MINILLM_MARCH should name" in error
    [warning] = [line for line in lines if "fail their test" in line]
    assert error in warning and "computes with NumPy" in warning


@pytest.mark.slow
def test_a_compiler_that_makes_wrong_code_is_found(tmp_path: Path) -> None:
    """One that takes rintf for floorf: keys and values in int8 are then rounded down. It does not optimise: quicker."""
    compiler = tmp_path / "faulty"
    compiler.write_text('#!/bin/sh\nexec cc -Drintf=floorf "$@" -O0\n')
    compiler.chmod(0o700)
    auto, error, _ = choice(tmp_path, CC=str(compiler), MINILLM_MARCH="")
    assert auto != "cpu"
    assert f"compiled by {compiler}, fail their test: store_kv, int8" in error and "\n" not in error


TOKENS = """
from minillm import Engine
from minillm.backends.cpu.compiling import compilers
print(compilers()[0][1:])
for backend in ("cpu", "numpy"):
    with Engine(backend=backend) as engine:
        print(engine.generate("A list of colors: red,", max_new_tokens=12).completions[0].token_ids)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(compiling.importlib.util.find_spec("ziglang") is None, reason="needs pip install ziglang")
def test_the_package_ziglang_compiles_where_there_is_no_other_compiler(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("CC", "MINILLM_MARCH")}
    environment |= {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", TOKENS], env=environment, capture_output=True, text=True, check=True)
    compiler, ours, numpys = done.stdout.splitlines()
    assert compiler == "['-m', 'ziglang', 'cc']" and ours == numpys
    assert len(list(tmp_path.rglob("*.so"))) == 1
