"""Every kernel compiles for every architecture, with CuPy's own options and no GPU, and takes what its table says."""

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from minillm.backends.cuda.compiling import CupyLauncher, compile_for
from minillm.errors import DeviceError
from scripts import kernel_budget
from scripts.kernel_budget import Build, builds, measure, read_table

from .builds import BUILDS, TENSOR_CORE

needs_cupy = pytest.mark.skipif(find_spec("cupy") is None, reason="needs CuPy and NVRTC (the extra cuda13)")

TABLE = {(use.module, use.constants, use.storage, use.arch, use.kernel): use for use in read_table()}


def name(build: Build) -> str:
    return "-".join(filter(None, (build.module, build.constants.replace(" ", ","), build.storage, f"sm_{build.arch}")))


def wants_tensor_cores(build: Build) -> bool:
    one_of = TENSOR_CORE.get(build.module)
    if one_of is None or build.storage == "float32":
        return False
    return not one_of or not set(one_of).isdisjoint(build.constants.split())


@needs_cupy
@pytest.mark.slow
@pytest.mark.parametrize("build", builds(), ids=name)
def test_kernels_take_what_their_table_says(build: Build) -> None:
    """After a change that is meant: python scripts/kernel_budget.py."""
    uses = measure(build)
    listed = {key[4] for key in TABLE if key[:4] == (build.module, build.constants, build.storage, build.arch)}
    assert {use.kernel for use in uses} == listed, "run python scripts/kernel_budget.py"
    for use in uses:
        assert use.spilled == 0, f"{use.kernel} spills"
        assert use == TABLE[use.module, use.constants, use.storage, use.arch, use.kernel], (
            "see scripts/kernel_budget.py"
        )


def test_table_has_no_builds_that_are_gone() -> None:
    known = {(build.module, build.constants, build.storage, build.arch) for build in builds()}
    assert {key[:4] for key in TABLE} == known


def test_every_listed_module_exists() -> None:
    modules = {build.module for build in builds()}
    assert set(BUILDS) | set(TENSOR_CORE) <= modules


@needs_cupy
@pytest.mark.slow
@pytest.mark.parametrize("build", [build for build in builds() if wants_tensor_cores(build)], ids=name)
def test_tensor_core_kernels_use_tensor_cores(build: Build) -> None:
    ptx, _ = compile_for(build.arch, build.path, build.options, "ptx")
    kind = "f16.f16" if build.storage == "float16" else "bf16.bf16"
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.f32" in ptx.decode()


@needs_cupy
@pytest.mark.slow
@pytest.mark.parametrize("build", [build for build in builds() if wants_tensor_cores(build)], ids=name)
def test_tensor_core_kernels_run_hmma(build: Build, tmp_path: Path) -> None:
    if not shutil.which("nvdisasm"):
        pytest.skip("nvdisasm is not installed")
    (tmp_path / "module.cubin").write_bytes(compile_for(build.arch, build.path, build.options)[0])
    command = ["nvdisasm", str(tmp_path / "module.cubin")]
    assert re.search(r"\bHMMA\b", subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@needs_cupy
@pytest.mark.slow
class TestErrors:
    def compile(self, folder: Path, code: str) -> None:
        (folder / "broken.cu").write_text(code)
        compile_for("90", folder / "broken.cu", ())

    def test_a_kernel_that_does_not_compile_names_file_and_line(self, tmp_path: Path) -> None:
        with pytest.raises(DeviceError, match=r'^kernel broken\.cu does not compile: broken\.cu:2: identifier "y" is'):
            self.compile(tmp_path, 'extern "C" __global__ void broken(float* x) {\n    x[0] = y;\n}\n')

    def test_an_error_in_a_header_names_the_header(self, tmp_path: Path) -> None:
        (tmp_path / "part.cuh").write_text("\n\nint f() { return nothing; }\n")
        with pytest.raises(DeviceError, match=r'part\.cuh:3: identifier "nothing" is undefined$'):
            self.compile(tmp_path, '#include "part.cuh"\n')

    def test_an_error_of_the_assembler(self, tmp_path: Path) -> None:
        with pytest.raises(DeviceError, match=r"^kernel broken\.cu does not compile: ptxas .*nonsense.*$"):
            self.compile(tmp_path, 'extern "C" __global__ void broken() { asm volatile("nonsense;"); }\n')

    def test_a_missing_header_of_ours(self, tmp_path: Path) -> None:
        with pytest.raises(DeviceError, match=r'broken\.cu:1: cannot open source file "gone\.cuh"'):
            self.compile(tmp_path, '#include "gone.cuh"\n')

    def test_missing_headers_of_the_toolkit(self, tmp_path: Path) -> None:
        with pytest.raises(
            DeviceError, match=r"toolkit are missing \(cuda_gone\.h\): pip install 'minillm\[cuda1[23]\]'"
        ):
            self.compile(tmp_path, "#include <cuda_gone.h>\n")

    def test_missing_nvrtc(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from cupy.cuda import compiler

        def create(*_: Any, **__: Any) -> Any:
            raise RuntimeError("CuPy failed to load libnvrtc.so.13: OSError: no such file")

        monkeypatch.setattr(compiler, "_NVRTCProgram", create)
        with pytest.raises(DeviceError, match=r"libnvrtc.*pip install 'minillm\[cuda1[23]\]'"):
            self.compile(tmp_path, "")

    def test_no_gpu(self) -> None:
        import cupy

        if cupy.cuda.is_available():
            pytest.skip("there is a GPU")
        with pytest.raises(DeviceError, match=r"^device 'cuda' needs an NVIDIA GPU and its driver: [^\n]+$"):
            CupyLauncher()


def test_budget_says_what_changed(tmp_path: Path) -> None:
    old = kernel_budget.Use("norm", "ROWS=1", "float16", "90", "layer_norm", 40, 128)
    new = kernel_budget.Use("norm", "ROWS=1", "float16", "90", "layer_norm", 41, 128)
    kernel_budget.write_table([old], tmp_path / "table.csv")
    assert kernel_budget.read_table(tmp_path / "table.csv") == [old]
    assert kernel_budget.differences([old], [old]) == []
    expected = ["norm ROWS=1 float16 90 layer_norm: (registers, shared) (40, 128) -> (41, 128)"]
    assert kernel_budget.differences([new], [old]) == expected


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"^device 'cuda' needs CuPy [^\n]*pip install 'minillm\[cuda13\]'[^\n]*$"):
        CupyLauncher()
