"""Benchmarks on the real model: they run, and all engines compute the same. No test looks at a speed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str) -> str:
    """What a benchmark prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments, "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_llama_cpp_computes_the_same_file(model_file: Path, tmp_path: Path) -> None:
    """Its perplexity of the text is that of minillm in float32, but for its activations in 8 bits."""
    pytest.importorskip("llama_cpp", reason="needs the peers extra")
    options = ["--engines", "minillm-numpy,llama.cpp", "--formats", "float32,int4", "--rounds", "1"]
    printed = run(
        "against_peers.py", "--model", str(model_file), *options, "--cases", "logits,perplexity", "--out", str(tmp_path)
    )
    table = printed[printed.index("perplexity of the text") :]
    found = dict(re.findall(r"^(\S.*?) {2,}([\d.]+) ", table, re.MULTILINE))
    exact, file = (float(found[name]) for name in ("minillm-numpy float32", "llama.cpp Q4_1, the file"))
    assert file == pytest.approx(exact, rel=0.01)
    assert float(re.findall(r"llama.cpp Q4_1, the file +([\d.e-]+) +[\d.e-]+\n", printed)[-1]) < 0.05


def test_minillm_runs_the_file_as_it_is(model_file: Path, tmp_path: Path) -> None:
    """In place of a conversion to the nearest format; an engine that reads no GGUF files is named."""
    options = [
        "--engines",
        "minillm-cpu,onnxruntime",
        "--formats",
        "float16,int4",
        "--rounds",
        "1",
        "--new-tokens",
        "3",
    ]
    printed = run("against_peers.py", "--model", str(model_file), *options, "--cases", "decode", "--out", str(tmp_path))
    engines = re.findall(r"^decode, batch 1 +(\S.*?) {2,}", printed, re.MULTILINE)
    assert engines == ["minillm-cpu float16", "minillm-cpu Q4_1, the file"]
    assert "left out: onnxruntime (it reads no GGUF files)" in printed
