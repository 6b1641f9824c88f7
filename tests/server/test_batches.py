"""Files of requests in OpenAI's batch format."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="batches need the extra serve")

from minillm import Engine
from minillm.cli.main import run
from minillm.errors import UsageError
from minillm.server.batches import read_batch, run_batch

PROMPTS = ["A list of colors: red,", "Count from 3 to 9:", "Once upon a time"]


def line(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"max_tokens": 6, "temperature": 0} | body}


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    asked = [line(f"r{i}", prompt=prompt) for i, prompt in enumerate(PROMPTS)]
    asked.insert(1, line("bad", prompt="A", temperature=-1))
    asked.append(line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "Count from 3 to 9:"}]))
    return written(tmp_path / "in.jsonl", asked)


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text(encoding="utf-8").splitlines()]


def texts(path: Path) -> list[Any]:
    found = []
    for result in results(path):
        body = result["response"]["body"]
        found.append((result["custom_id"], body.get("choices", [{}])[0].get("text"), body.get("error")))
    return found


@pytest.mark.longer
def test_results_have_the_order_of_the_requests(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    done = run_batch(Engine(backend="numpy"), source, target)
    found = results(target)
    assert [each["custom_id"] for each in found] == ["r0", "bad", "r1", "r2", "chat"]
    assert [each["response"]["status_code"] for each in found] == [200, 400, 200, 200, 400]
    assert all(each["id"] == each["response"]["request_id"] and each["error"] is None for each in found)
    with Engine(backend="numpy") as engine:
        expected = [engine.generate(prompt, max_new_tokens=6).text for prompt in PROMPTS]
    assert [found[i]["response"]["body"]["choices"][0]["text"] for i in (0, 2, 3)] == expected
    (name, status, message), (chat, _, without) = done.failed
    assert (name, status, done.requests, done.resumed) == ("bad", 400, 5, 0) and "temperature" in message
    assert chat == "chat" and "no chat template" in without


@pytest.mark.longer
def test_an_interrupted_run_goes_on(source: Path, tmp_path: Path) -> None:
    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run_batch(Engine(backend="numpy"), source, whole)
    data = whole.read_bytes()
    third = data.split(b"\n")[2]
    target.write_bytes(data[: data.index(third) + 20])  # in the middle of the third
    before = results(whole)[:2]
    done = run_batch(Engine(backend="numpy"), source, target)
    assert (done.resumed, done.again) == (1, 1)  # the second had failed
    assert results(target)[:2] == before  # as they were, with their ids
    assert texts(target) == texts(whole)
    assert run_batch(Engine(backend="numpy"), source, target).resumed == 3


@pytest.mark.slow
def test_a_run_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    asked = [line(f"r{i}", prompt=PROMPTS[i % 3], max_tokens=60) for i in range(200)]
    source, target = written(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "minillm", "batch", str(source), str(target), "--max-batch-size", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (target.exists() and target.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = target.read_bytes()
    assert run(["batch", str(source), str(target)]) == 0
    assert target.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert [each["custom_id"] for each in results(target)] == [each["custom_id"] for each in asked]


@pytest.mark.longer
def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["batch", str(source), str(tmp_path / "out.jsonl"), "--backend", "numpy"]) == 1
    err = capsys.readouterr().err
    assert "bad: 400: " in err and "5 requests, 0 of them done before, 2 failed" in err
    assert run(["batch", str(source), str(source)]) == 2
    assert "is the input: name another output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["x"], "line 1 should be an object with custom_id, method, url and body"),
        ([line("a"), line("a")], "line 2: custom_id should be text that no other line has, found 'a'"),
        ([line("a") | {"method": "GET"}], "line 1: method should be 'POST' and url one of"),
        ([line("a", "/v1/moderations")], "found 'POST' and '/v1/moderations'"),
        ([line("a", stream=True)], "line 1: stream has no effect in a batch"),
        ([line("a") | {"priority": 1}], "line 1: there is no field 'priority'"),
    ],
)
def test_lines_that_are_no_requests(lines: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        read_batch(written(tmp_path / "in.jsonl", lines))


def test_the_results_of_others_are_left_alone(source: Path, tmp_path: Path) -> None:
    target = written(tmp_path / "out.jsonl", [{"custom_id": "other"}])
    before = target.read_bytes()
    with (
        Engine(backend="numpy") as engine,
        pytest.raises(UsageError, match="is the result of another request, 'other'"),
    ):
        run_batch(engine, source, target)
    assert target.read_bytes() == before
