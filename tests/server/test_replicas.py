"""Files of requests over several engines: Ray actors on a local cluster of two nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="batches need the extra serve")

from minillm.cli.main import run
from minillm.errors import ParameterError
from minillm.server.replicas import cores_of_each

from ..task_models import BERT, write_task_model
from .test_batches import PROMPTS, line, results, written

needs_ray = pytest.mark.usefixtures("ray")
ROOT = Path(__file__).parents[2]

PROGRAM = """
import logging, os, signal, sys, threading, time
from functools import partial
from pathlib import Path
from unittest.mock import patch
import ray
from ray.cluster_utils import Cluster
from minillm import Engine
from minillm.server import batches, replicas
from minillm.errors import MinillmError

logging.basicConfig(level=logging.WARNING, format="%(message)s")
source, target = map(Path, sys.argv[1:])

def say(*words):  # Ray prints too
    print("=", *words, flush=True)

def make(threads):
    engine = Engine(backend="numpy", threads=threads, max_batch_size=2)
    return engine

def when_written(count, call):  # in a thread: call once, when so many results are there
    def watch():
        while not (target.exists() and target.read_bytes().count(b"\\n") >= count):
            time.sleep(0.02)
        call()
    threading.Thread(target=watch, daemon=True).start()
"""

CLUSTER = """
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
"""
"""A head without cores and two nodes of one core each"""

MACHINE = """
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
"""


@pytest.fixture(scope="module")
def ray() -> None:
    if subprocess.run([sys.executable, "-c", "import ray"], capture_output=True).returncode != 0:
        pytest.skip("needs Ray")


def on_ray(start: str, code: str, *words: object) -> tuple[list[str], str]:
    """What a program says after it has started Ray, and its errors."""
    code = PROGRAM + start + code + "\nray.shutdown()\n" + ("cluster.shutdown()\n" if start == CLUSTER else "")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    command = [sys.executable, "-c", code, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    return [line[2:] for line in ended.stdout.splitlines() if line.startswith("= ")], ended.stderr


def asked(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [line(f"r{i}", prompt=PROMPTS[i % 3], **fields) for i in range(count)]


def bodies(path: Path) -> list[Any]:
    return [(each["custom_id"], each["response"]["body"]["choices"][0]["text"]) for each in results(path)]


@pytest.mark.slow
@needs_ray
def test_two_replicas_answer_as_one_engine_in_order_and_go_on(tmp_path: Path) -> None:
    requests = asked(40)
    requests[7]["body"]["temperature"] = -1
    source, target = written(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    code = """
done = replicas.run_replicas(make, 2, source, target)
say(done.requests, done.resumed, [name for name, *_ in done.failed])
whole = target.read_bytes()
target.write_bytes(whole[: whole.index(b'"r20"') + 9])  # in the middle of a line
done = replicas.run_replicas(make, 2, source, target)
say(done.requests, done.resumed, [name for name, *_ in done.failed])
"""
    said, errors = on_ray(CLUSTER, code, source, target)
    assert said == ["40 0 ['r7']", "40 19 ['r7']"], errors  # it is run again
    alone = written(tmp_path / "alone.jsonl", requests[:7] + requests[8:])
    assert run(["batch", str(alone), str(tmp_path / "theirs.jsonl"), "--backend", "numpy"]) == 0
    found = results(target)
    assert [each["custom_id"] for each in found] == [each["custom_id"] for each in requests]
    assert found[7]["response"]["status_code"] == 400
    theirs = dict(bodies(tmp_path / "theirs.jsonl"))
    for each in found[:7] + found[8:]:
        assert each["response"]["body"]["choices"][0]["text"] == theirs[each["custom_id"]]


@pytest.mark.exhaustive
@needs_ray
@pytest.mark.parametrize("what", ["replica", "node"])
def test_a_replica_that_is_killed_loses_nothing(what: str, tmp_path: Path) -> None:
    source, target = written(tmp_path / "in.jsonl", asked(120, max_tokens=40)), tmp_path / "out.jsonl"
    kill = {
        "node": "lambda: cluster.remove_node(nodes[0], allow_graceful=False)",
        "replica": "lambda: os.kill(int(places[-1].split()[-1]), signal.SIGKILL)",
    }[what]
    code = f"""
places, taken = [], replicas._Fleet._taken
def watched(self, call):
    member, method, _ = self._calls[call]
    found = taken(self, call)
    if method == "place":
        places.append(member.where)
    return found
replicas._Fleet._taken = watched
give = replicas._Fleet._give
replicas._Fleet._give = lambda self: give(self) if len(places) >= 2 else None  # both have begun when one is killed
when_written(5, {kill})
done = replicas.run_replicas(make, 2, source, target)
say(done.requests, done.failed)
"""
    said, errors = on_ray(CLUSTER, code, source, target)
    assert said == ["120 []"], errors
    assert "has died; its" in errors
    assert [name for name, _ in bodies(target)] == [f"r{i}" for i in range(120)]
    assert len({text for _, text in bodies(target)}) == 3  # the same prompt, the same text


@pytest.mark.slow
@needs_ray
def test_a_request_that_ends_its_replicas_fails_alone(tmp_path: Path) -> None:
    source, target = written(tmp_path / "in.jsonl", asked(20)), tmp_path / "out.jsonl"
    code = """
class Deadly(replicas.Replica):
    async def answer(self, request):
        if request["custom_id"] == "r3":
            os._exit(1)
        return await super().answer(request)
with patch.object(replicas, "Replica", Deadly):
    done = replicas.run_replicas(make, 2, source, target)
say(done.requests, done.failed)
def broken(threads):
    raise MinillmError("there is no such model")
try:
    replicas.run_replicas(broken, 1, source, target.with_name("other"))
except MinillmError as error:
    say(error)
"""
    said, errors = on_ray(MACHINE, code, source, target)
    assert said == [
        "20 [('r3', 500, '3 replicas have died while they computed it')]",
        "there is no such model",
    ], errors
    assert errors.count("has died; its") == 3
    answers = results(target)
    assert [answer["custom_id"] for answer in answers] == [f"r{i}" for i in range(20)]
    texts = {answer["response"]["body"]["choices"][0]["text"] for answer in answers if answer["response"]}
    assert len(texts) == 3  # the same prompt, the same text


def test_cores_are_shared_evenly() -> None:
    assert cores_of_each([2, 2], 2) == 2
    assert cores_of_each([2, 2], 3) == 1
    assert cores_of_each([1, 5], 2) == 2
    assert cores_of_each([0, 64], 3) == 21
    with pytest.raises(ParameterError, match="5 replicas need as many cores, and the Ray cluster has 4"):
        cores_of_each([2, 2], 5)


def test_what_cannot_be_run_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = written(tmp_path / "in.jsonl", asked(2)), tmp_path / "out.jsonl"
    monkeypatch.setitem(sys.modules, "ray", None)
    for words, message in {
        ("--replicas", "2"): "replicas need Ray: pip install",
        ("--replicas", "0"): "--replicas should be a number above 0, found 0",
        ("--replicas", "2", "--tensor-parallel", "2"): "--replicas and --tensor-parallel do not go together",
    }.items():
        assert run(["batch", str(source), str(target), *words]) != 0
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_replicas_take_the_models_that_one_engine_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder too, for /v1/embeddings."""
    from minillm.server import replicas
    from minillm.server.batches import Done

    made = []

    def run_replicas(make: Any, count: int, *paths: Path, **options: Any) -> Done:
        made.append(make(1))
        return Done(1)

    monkeypatch.setattr(replicas, "run_replicas", run_replicas)
    request = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "the cat"}}
    source, folder = written(tmp_path / "in.jsonl", [request]), write_task_model(tmp_path / "model", BERT)
    assert run(["batch", str(source), str(tmp_path / "out.jsonl"), "-m", str(folder), "--replicas", "2"]) == 0
    assert [engine.config.model_type for engine in made] == ["bert"]


def test_results_without_a_response_are_listed_as_failures(tmp_path: Path) -> None:
    from minillm.server.batches import Done, write_result

    done = Done(1)
    with (tmp_path / "out").open("w") as out:
        write_result({"custom_id": "a", "response": None, "error": {"code": "x", "message": "died"}}, out, done)
    assert done.failed == [("a", 500, "died")] and json.loads((tmp_path / "out").read_text())["response"] is None
