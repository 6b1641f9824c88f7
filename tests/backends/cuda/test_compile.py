"""Every kernel compiles for every architecture, with CuPy's own options and no GPU, and takes what its table says."""

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minillm.backends.cuda.attention import DECODE_THREADS, staged_bytes
from minillm.backends.cuda.compiling import CupyLauncher, _CupyModule, compile_for
from minillm.backends.cuda.dependent import WAITING
from minillm.errors import DeviceError
from scripts import kernel_budget
from scripts.kernel_budget import Build, builds, measure, read_table

from .builds import BUILDS, TENSOR_CORE

needs_cupy = pytest.mark.skipif(find_spec("cupy") is None, reason="needs CuPy and NVRTC (the extra cuda13)")

ALL = list(builds())
TABLE = {(use.module, use.constants, use.storage, use.arch, use.kernel): use for use in read_table()}
KERNELS: dict[Build, set[str]] = {}
"""Kernels that the table lists of each build"""
REGISTERS: Counter[Build] = Counter()
"""How many these take together"""
for use in TABLE.values():
    listed = Build(use.module, use.constants, use.storage, use.arch)
    KERNELS.setdefault(listed, set()).add(use.kernel)
    REGISTERS[listed] += use.registers


def name(build: Build) -> str:
    return "-".join(filter(None, (build.module, build.constants.replace(" ", ","), build.storage, f"sm_{build.arch}")))


def wants_tensor_cores(build: Build) -> bool:
    one_of = TENSOR_CORE.get(build.module)
    if one_of is None or build.storage == "float32":
        return False
    return not one_of or not set(one_of).isdisjoint(build.constants.split())


def one_of_each_kernel(arch: str, storage: str = "float16") -> list[Build]:
    """Builds that together have every kernel; where several would do, the one that is soonest compiled."""
    chosen: dict[Any, Build] = {}
    for build in sorted((b for b in ALL if (b.storage, b.arch) == (storage, arch)), key=REGISTERS.__getitem__):
        chosen.setdefault((build.module, frozenset(KERNELS.get(build, ()))), build)
    return sorted(chosen.values())


def thinned(some: Iterable[Build], few: Iterable[Build]) -> list[Any]:
    """Parameters of a test: `some`, of which only `few` are not exhaustive."""
    few = set(few)
    return [build if build in few else pytest.param(build, marks=pytest.mark.exhaustive) for build in some]


def one_of_each_module(some: Iterable[Build]) -> list[Build]:
    """For each storage type of each."""
    chosen: dict[Any, Build] = {}
    for build in sorted(some, key=REGISTERS.__getitem__):
        chosen.setdefault((build.module, build.storage), build)
    return list(chosen.values())


FEW = {*one_of_each_kernel("90"), *one_of_each_kernel("90a")}
"""Each kernel with 16 bits for one architecture, those that there are with 32 alone, and the other architectures"""
FEW |= {b for b in one_of_each_kernel("90", "float32") if not any(KERNELS[b] <= KERNELS[other] for other in FEW)}
FEW |= {b for arch in ("80", "120") for b in one_of_each_kernel(arch) if b.module in ("attention_prefill", "norm")}


@needs_cupy
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "build",
    thinned(
        [
            *one_of_each_kernel("80"),
            *(build for build in ALL if build.arch in ("90", "90a") and build.storage != "bfloat16"),
            *one_of_each_kernel("90", "bfloat16"),
            *one_of_each_kernel("120"),
        ],
        FEW,
    ),
    ids=name,
)
def test_kernels_take_what_their_table_says(build: Build) -> None:
    """After a change that is meant: python scripts/kernel_budget.py, which measures them all."""
    uses = measure(build)
    assert {use.kernel for use in uses} == KERNELS.get(build, set()), "run python scripts/kernel_budget.py"
    for use in uses:
        assert use.spilled == 0, f"{use.kernel} spills"
        assert use == TABLE[use.module, use.constants, use.storage, use.arch, use.kernel], (
            "see scripts/kernel_budget.py"
        )


@needs_cupy
@pytest.mark.exhaustive
@pytest.mark.parametrize("build", one_of_each_kernel("90"), ids=name)
def test_kernels_that_check_their_indices_compile(build: Build) -> None:
    """As MINILLM_CUDA_DEBUG=1 builds them: with an index from a table they have the device's printf and trap."""
    ptx, _ = compile_for(build.arch, build.path, (*build.options, "-DMINILLM_CUDA_DEBUG"), "ptx")
    indexed = (
        "attention_decode attention_prefill attention_wgmma convolution delta_rule embed expand experts kv low_rank "
        "norm_rotate_store selective_scan step"
    )
    checks = build.module in indexed.split() or "STORES" in build.constants
    checks &= not (build.module.startswith("attention") and "VALUES" in build.constants)
    assert (b"vprintf" in ptx) == checks


def test_table_has_no_builds_that_are_gone() -> None:
    assert set(KERNELS) == set(ALL)


def test_every_listed_module_exists() -> None:
    modules = {build.module for build in ALL}
    assert set(BUILDS) | set(TENSOR_CORE) <= modules


ON_TENSOR_CORES = [build for build in ALL if build.arch == "90" and wants_tensor_cores(build)]


@needs_cupy
@pytest.mark.exhaustive
@pytest.mark.parametrize("build", thinned(ON_TENSOR_CORES, one_of_each_module(ON_TENSOR_CORES)), ids=name)
def test_tensor_core_kernels_use_tensor_cores(build: Build) -> None:
    ptx, _ = compile_for(build.arch, build.path, build.options, "ptx")
    kind = "f16.f16" if build.storage == "float16" else "bf16.bf16"
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.f32" in ptx.decode()


@needs_cupy
@pytest.mark.exhaustive
@pytest.mark.parametrize("build", thinned(ON_TENSOR_CORES, one_of_each_module(ON_TENSOR_CORES)), ids=name)
def test_tensor_core_kernels_run_hmma(build: Build, tmp_path: Path) -> None:
    assert re.search(r"\bHMMA\b", sass(build, tmp_path))


def sass(build: Build, folder: Path) -> str:
    """The instructions of a build's kernels for the GPU itself."""
    if not shutil.which("nvdisasm"):
        pytest.skip("nvdisasm is not installed")
    compiled, _ = compile_for(build.arch, build.path, build.options)
    (folder / "module.cubin").write_bytes(compiled + b"\0")  # CuPy leaves out the last byte
    command = ["nvdisasm", "-c", str(folder / "module.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


PREFETCHING = [
    build
    for build in ALL
    if (build.storage, build.arch) == ("float16", "90")
    and build.module in ("gemv", "norm")
    and build.constants not in ("VECTORS=4", "VECTORS=8")
    and "BITS" not in build.constants  # with a barrier for each stage
]


@needs_cupy
@pytest.mark.exhaustive
@pytest.mark.parametrize("build", thinned(PREFETCHING, one_of_each_module(PREFETCHING)), ids=name)
def test_what_is_added_after_a_sum_is_loaded_before_it(build: Build, tmp_path: Path) -> None:
    """No load from global memory stands behind the first barrier of a reduction, where its latency would show."""
    for kernel in sass(build, tmp_path).split("//--------------------- .text.")[1:]:
        assert kernel.rindex("LDG.E") < kernel.index("BAR.SYNC"), kernel.splitlines()[0]


FULL = {Build(use.module, use.constants, use.storage, use.arch) for use in TABLE.values() if use.registers == 128}
"""Builds that have no register left"""
FIRST = {*{(b.module, frozenset(KERNELS[b]), b.storage, b.arch): b for b in reversed(ALL) if b in KERNELS}.values()}
"""One build of each kernel, storage type and architecture"""
DEPENDENT = [
    build
    for build in ALL
    if (build.storage, build.arch) in (("float16", "90"), ("float32", "90"))
    and KERNELS[build] & WAITING
    and (build.storage == "float16" or build.module == "gemm")
    and "BITS" not in build.constants  # which copy W, that no kernel writes, before they wait
    and (build in FULL or build in FIRST)
]
"""Each kernel that waits for those before it, and all builds that might spill; of float32 what 16 bits do not have"""
BEFORE_THE_WAIT = re.compile(r"\b(ld\.global|st\.global|cp\.async|atom|red)\b")
"""Instructions of PTX that no kernel runs before it has waited"""
BEFORE_ITS_INSTRUCTION = re.compile(r"\b(LDG|LDGSTS|STG|ATOMG|RED)\b")
"""The same in a GPU's own instructions, of which ACQBULK waits"""


@needs_cupy
@pytest.mark.exhaustive
@pytest.mark.parametrize("build", thinned(DEPENDENT, FIRST - FULL), ids=name)
def test_dependent_kernels_wait_before_they_touch_memory(build: Build, tmp_path: Path) -> None:
    """They let the next one begin first, and spill nothing; in PTX, and in instructions where nvdisasm is installed."""
    build = replace(build, constants=f"DEPENDENT=1 {build.constants}")
    ptx, _ = compile_for(build.arch, build.path, build.options, "ptx")
    kernels = {part[: part.index("(")]: part for part in ptx.decode().split(".visible .entry ")[1:]}
    for kernel in kernels.keys() & WAITING:
        before, _ = kernels[kernel].split("griddepcontrol.wait", maxsplit=1)
        assert "griddepcontrol.launch_dependents" in before, kernel
        assert not BEFORE_THE_WAIT.search(before), kernel
    assert all(use.spilled == 0 for use in measure(build))
    if shutil.which("nvdisasm"):
        for text in sass(build, tmp_path).split("//--------------------- .text.")[1:]:
            if text.split()[0] in WAITING:
                before, _ = text.split("ACQBULK", maxsplit=1)
                assert "PREEXIT" in before and not BEFORE_ITS_INSTRUCTION.search(before), text.split()[0]


@needs_cupy
@pytest.mark.exhaustive
@pytest.mark.parametrize("D", [64, 128])
def test_a_split_of_keys_and_values_is_copied_before_a_score_is_taken(D: int, tmp_path: Path) -> None:
    build = next(
        build
        for build in ALL
        if (build.module, build.storage, build.arch) == ("attention_decode", "float16", "90")
        and f"GROUP=1 HEAD_DIM={D}" in build.constants
        and "BIASED" not in build.constants
    )
    before_scores, _ = sass(build, tmp_path).split("SHFL", maxsplit=1)
    assert before_scores.count("LDGSTS") == staged_bytes(D, 2) // (16 * DECODE_THREADS)


@needs_cupy
@pytest.mark.exhaustive
def test_masses_are_added_in_shared_memory_without_a_loop() -> None:
    """An addition of 64 bits there is a loop of compare and swap; 32 bits are one instruction."""
    build = next(build for build in ALL if (build.module, build.arch) == ("sampling", "90"))
    ptx, _ = compile_for(build.arch, build.path, build.options, "ptx")
    assert set(re.findall(rb"atom\.shared\.[\w.]+", ptx)) == {b"atom.shared.add.u32"}


WARPGROUPS = [build for build in ALL if "wgmma" in build.module or build.module == "gemm_tma"]


@needs_cupy
@pytest.mark.exhaustive
@pytest.mark.parametrize("build", thinned(WARPGROUPS, one_of_each_module(WARPGROUPS)), ids=name)
def test_products_of_warpgroups_are_not_put_in_a_row(build: Build) -> None:
    """The assembler does so, and says it, where registers of a product under way might be used."""
    kind = "f16.f16" if build.storage == "float16" else "bf16.bf16"
    constants = "TILE_OUTS=128" if "BITS" in build.constants else build.constants  # of integers the rows are columns
    columns = re.search(r"(TILE_OUTS|KEYS)=(\d+)", constants)[2]  # type: ignore[index]
    ptx, _ = compile_for(build.arch, build.path, build.options, "ptx")
    assert ptx.decode().count(f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}") >= 4
    # As on a GPU, where CuPy adds the device's architecture after ours.
    _, report = compile_for("90", build.path, ("-arch=sm_90a", *build.options))
    assert "serialized" not in report


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
            DeviceError, match=r"toolkit are missing \(cuda_gone\.h\): pip install -e '.*\[cuda1[23]\]'"
        ):
            self.compile(tmp_path, "#include <cuda_gone.h>\n")

    def test_missing_nvrtc(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from cupy.cuda import compiler

        def create(*_: Any, **__: Any) -> Any:
            raise RuntimeError("CuPy failed to load libnvrtc.so.13: OSError: no such file")

        monkeypatch.setattr(compiler, "_NVRTCProgram", create)
        with pytest.raises(DeviceError, match=r"libnvrtc.*pip install -e '.*\[cuda1[23]\]'"):
            self.compile(tmp_path, "")

    def test_no_gpu(self) -> None:
        import cupy

        if cupy.cuda.is_available():
            pytest.skip("there is a GPU")
        with pytest.raises(DeviceError, match=r"^device 'cuda' needs an NVIDIA GPU and its driver: [^\n]+$"):
            CupyLauncher()


@pytest.mark.parametrize(
    "words",
    [
        "CuPy failed to load libnvrtc.so.13: OSError: no such file",
        "Failed to find CUDA headers.\n\nInstall them",
    ],
    ids=["library", "headers"],
)
def test_a_missing_part_of_the_toolkit_is_one_line(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CuPy says it, with or without CuPy."""

    class Module:
        def get_function(self, name: str) -> Any:
            raise RuntimeError(words)

    compiler = SimpleNamespace(CompileException=type("CompileException", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "cupy.cuda.compiler", compiler)
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(compiler=compiler))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    with pytest.raises(DeviceError, match=r"^a part of the CUDA toolkit is missing \([^\n]*\): pip install [^\n]*$"):
        _CupyModule(Path("embed.cu"), Module()).get_function("embed")


def test_another_error_of_cupy_is_not_taken_for_a_missing_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        def get_function(self, name: str) -> Any:
            raise RuntimeError("the graph is empty")

    compiler = SimpleNamespace(CompileException=type("CompileException", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "cupy.cuda.compiler", compiler)
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(compiler=compiler))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    with pytest.raises(RuntimeError, match="the graph is empty"):
        _CupyModule(Path("embed.cu"), Module()).get_function("embed")


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
    with pytest.raises(DeviceError, match=r"^device 'cuda' needs CuPy [^\n]*pip install -e '.*\[cuda13\]'[^\n]*$"):
        CupyLauncher()
