"""The real model on several processes gives one process's text."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mpi4py")
MPIEXEC = shutil.which("mpiexec") or shutil.which("mpiexec", path=str(Path(sys.executable).parent))


@pytest.mark.real
@pytest.mark.skipif(MPIEXEC is None, reason="there is no mpiexec")
@pytest.mark.parametrize(
    ("tensor", "pipeline"), [(3, 1), pytest.param(1, 2, marks=pytest.mark.exhaustive)]
)  # 9 heads, 3 of keys and values
def test_processes_say_what_transformers_says(
    tensor: int, pipeline: int, model_file: Path, expected: dict[str, Any]
) -> None:
    case = expected["continuations"][0]
    words = ["generate", case["prompt"], "--model", model_file, "-n", len(case["tokens"]), "--dtype", "float32"]
    degrees = ["--tensor-parallel", tensor, "--pipeline-parallel", pipeline, "--threads", 1]
    command = [MPIEXEC, "-n", tensor * pipeline, sys.executable, "-m", "minillm", *words, *degrees]
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "HYDRA_LAUNCHER": "fork"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == case["text"] + "\n"
