"""Commands that look inside a model, and the server, under mpiexec and in the script for Slurm."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from minillm import Engine

from ..adapters import write_adapter
from ..pages import block
from ..tiny import write_checkpoint
from .processes import MPIEXEC, alone, assert_none_is_left, end, ended, output, ranks_of, started, under_mpi

pytest.importorskip("mpi4py")
httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette", reason="the server needs the extra serve")
pytestmark = under_mpi

ROOT = Path(__file__).parents[2]
TEXT = "A list of colors: red,"
TENSOR, STAGES = ["--tensor-parallel", 2], ["--pipeline-parallel", 2]
BOTH = [*TENSOR, *STAGES]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+|\d+", text)]


# --- commands ---------------------------------------------------------------------------------------------------------


def test_compare(tmp_path: Path) -> None:
    words = ["compare", TEXT, "--max-new-tokens", 6, "--json", "--threads", 1]
    page = tmp_path / "page.html"
    ours, theirs = (json.loads(text) for text in (output(4, *words, *BOTH, "--html", page), alone(*words)))
    for one, other in zip(ours["results"], theirs["results"], strict=True):
        assert (one["name"], one["token_ids"]) == (other["name"], other["token_ids"])
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
    assert "<svg" in page.read_text(encoding="utf-8")


def test_inspect(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["inspect", TEXT, "--threads", 1, "--layer", 5, "--attention"]
    ours, theirs = output(2, *words, tmp_path / "ours.svg", *STAGES), alone(*words, tmp_path / "theirs.svg")
    strip = [re.sub(r"\d\.\d+", "", text).splitlines()[:-1] for text in (ours, theirs)]
    assert strip[0] == strip[1]
    assert numbers("".join(ours.splitlines()[:-1])) == pytest.approx(
        numbers("".join(theirs.splitlines()[:-1])), abs=2e-3
    )
    assert (tmp_path / "ours.svg").stat().st_size > 1000


def test_perplexity_loads_a_model_of_each_dtype_on_each_rank(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT * 20, encoding="utf-8")
    words = ["perplexity", "--text", tmp_path / "text", "--dtype", "float32,int8", "--json", "--threads", 1]
    ours, theirs = output(2, *words, *STAGES), alone(*words)
    for one, other in zip(*(map(json.loads, text.splitlines()) for text in (ours, theirs)), strict=True):
        assert one["dtype"] == other["dtype"]
        assert one["perplexity"] == pytest.approx(other["perplexity"], rel=1e-4)
        assert one["weight_bytes"] >= other["weight_bytes"]


def test_profile() -> None:
    words = ["profile", "--prompt-length", 8, "--new-tokens", 3, "--repeat", 1, "--hardware", "a100", "--json"]
    found = json.loads(output(2, *words, "--threads", 1, *TENSOR))
    assert "rank 0 of 2" in found["title"]
    assert {one["name"]: one["calls"] for one in found["phases"]["decode"]["operations"]}["reduce"] > 0


# --- the server -------------------------------------------------------------------------------------------------------


def address_of(process: "subprocess.Popen[str]") -> str:
    """Where a server listens, once it does."""
    assert process.stderr is not None
    watch = threading.Timer(120, end, [process])
    watch.start()
    try:
        for line in process.stderr:
            if found := re.search(r"listening at (\S+)", line):
                return found[1]
    finally:
        watch.cancel()
    raise AssertionError("the server has ended")


def asked(url: str, **body: Any) -> str:
    body = {"max_tokens": 8, "temperature": 0} | body
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_the_server_of_two_models_on_two_ranks(tmp_path: Path) -> None:
    """Two models that say different things, asked at the same time; SIGTERM for rank 0 ends all."""
    folders = {"one": ROOT / "minillm" / "assets" / "demo-opt", "two": write_checkpoint(tmp_path / "two", seed=3)}
    prompts = [TEXT + " blue," * i for i in range(3)]
    expected = {}
    for name, folder in folders.items():
        with Engine(folder, backend="numpy", cache_bytes=1 << 24) as engine:
            found = [generation.text for generation in engine.generate(prompts, max_new_tokens=8)]
            expected |= {(name, prompt): text for prompt, text in zip(prompts, found, strict=True)}
    assert all(expected.values()) and all(expected["one", each] != expected["two", each] for each in prompts)
    words = [word for name, folder in folders.items() for word in ("--model", f"{name}={folder}")]
    process = started(2, "serve", "--port", 0, "--threads", 1, *words, "--tensor-parallel", 2, stdin=subprocess.DEVNULL)
    try:
        url = address_of(process)
        asks = [*expected] * 2
        with ThreadPoolExecutor(len(asks)) as pool:
            texts = list(pool.map(lambda ask: asked(url, model=ask[0], prompt=ask[1]), asks))
        assert texts == [expected[ask] for ask in asks]
        maps = httpx.post(f"{url}/inspect/attention", json={"token_ids": [5, 6, 7], "model": "one"}).json()["weights"]
        assert len(maps) == 6 and all(sum(head) == pytest.approx(1, abs=1e-4) for layer in maps for head in layer)
        pids = ranks_of(process)
        os.kill(pids[1], signal.SIGTERM)  # as Slurm sends it to every task: the other one ends it
        os.kill(pids[0], signal.SIGTERM)
        code, err = ended(process)
        assert code == 0 and "Traceback" not in err
    finally:
        end(process)
    assert_none_is_left(pids)


def test_the_server_of_adapters_on_four_ranks(tmp_path: Path) -> None:
    folder, adapter = write_checkpoint(tmp_path / "base", seed=3), write_adapter(tmp_path / "change")
    words = ["serve", "--port", 0, "--threads", 1, "-m", f"base={folder}", "--adapters", f"change={adapter}"]
    process = started(4, *words, *BOTH, stdin=subprocess.DEVNULL)
    try:
        url, prompt = address_of(process), [40, 41, 42, 43]

        def text_and_ids(model: str) -> Any:
            body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            return httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()

        names = {each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"]}
        assert names == {"base", "change"}
        plain, changed = text_and_ids("base"), text_and_ids("change")
        assert plain != changed
        pids = ranks_of(process)
        os.kill(pids[3], signal.SIGKILL)
        assert ended(process)[0] != 0
    finally:
        end(process)
    assert_none_is_left(pids)


def test_the_python_example() -> None:
    code = block("minillm/distributed/README.md", "python", "from minillm.parallel import Parallel")
    text = Engine().generate("Once upon a time").text
    assert output(2, code=code.replace('"path/to/checkpoint"', "None")).strip() == text.strip()


SRUN = """#!{python}
import os, re, sys
script = open({script!r}).read()
counts = {{name: int(value) for name, value in re.findall(r"--(nodes|ntasks-per-node)=(\\d+)", script)}}
words = [word for word in sys.argv[1:] if word != "--mpi=pmi2"]
words[words.index("--model") + 1] = {model!r}
words[words.index("python")] = sys.executable
ranks = counts["nodes"] * counts["ntasks-per-node"]
os.execv({mpiexec!r}, [{mpiexec!r}, "-n", str(ranks), *words, "--port", "0", "--backend", "numpy"])
"""


def test_the_script_for_slurm(tmp_path: Path) -> None:
    """The guide's script as it is, with an `srun` that starts its tasks on this machine, and a model that exists."""
    script = block("minillm/distributed/README.md", "sh", "#!/bin/sh\n#SBATCH")
    path, srun = tmp_path / "job.sh", tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    path.write_text(script, encoding="utf-8")
    model = ROOT / "minillm" / "assets" / "demo-opt"
    srun.write_text(SRUN.format(python=sys.executable, script=str(path), model=str(model), mpiexec=str(MPIEXEC)))
    srun.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{srun.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HYDRA_LAUNCHER": "fork",
    }  # fmt: skip
    process = subprocess.Popen(
        ["sh", str(path)], env=environment, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        url = address_of(process)
        assert asked(url, prompt=TEXT).startswith(" orange, yellow,")
        pids = ranks_of(process)
        assert len(pids) == 8
        os.kill(pids[0], signal.SIGTERM)
        assert ended(process)[0] == 0
    finally:
        end(process)
    assert_none_is_left(pids)
