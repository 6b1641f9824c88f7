"""Paths of g++ and of the headers of the CUDA toolkit."""

import importlib.util
import os
import shutil
import sys
from functools import cache
from pathlib import Path

NEEDED = ("cuda_fp16.h", "cuda_bf16.h", "vector_types.h", "crt/host_defines.h")


@cache
def compiler() -> str | None:
    """The C++ compiler: $CXX, or g++."""
    return shutil.which(os.environ.get("CXX", "g++"))


@cache
def cuda_headers() -> Path | None:
    """The folder of the toolkit's headers: from NVIDIA's wheels, $CUDA_HOME or /usr/local."""
    for folder in _candidates():
        if all((folder / name).is_file() for name in NEEDED):
            return folder
    return None


def missing() -> str | None:
    """A sentence about something that the emulator needs and this machine lacks; None if it can run."""
    if sys.platform != "linux":
        return f"the CUDA emulator runs on Linux, found {sys.platform}"
    if compiler() is None:
        return "the CUDA emulator needs g++, a C++ compiler: install one, or name it in $CXX"
    if cuda_headers() is None:
        return "the CUDA emulator needs the toolkit's headers (pip install nvidia-cuda-runtime nvidia-cuda-crt)"
    return None


def _candidates() -> list[Path]:
    folders = []
    wheels = importlib.util.find_spec("nvidia")  # a namespace package, spread over all of NVIDIA's wheels
    for root in (wheels.submodule_search_locations or []) if wheels else []:
        folders += [Path(root) / "cu13" / "include", Path(root) / "cuda_runtime" / "include"]
    if home := os.environ.get("CUDA_HOME"):
        folders.append(Path(home) / "include")
    folders += [path / "include" for path in sorted(Path("/usr/local").glob("cuda*"), reverse=True)]
    return folders
