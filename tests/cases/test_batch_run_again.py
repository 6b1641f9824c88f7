"""A file of requests that is run again after a failure, an interruption, or a change of its input."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="batches need the extra serve")

from minillm import Engine
from minillm.cli.main import run
from minillm.server.batches import Done, id_of, read_batch, results_file, resumed, run_batch, write_result

from ..server.test_batches import line, results, written

ABSENT, INSIDE = "somebody-elses-model", "minillm"


def statuses(target: Path) -> list[tuple[str, int]]:
    return [(result["custom_id"], result["response"]["status_code"]) for result in results(target)]


def texts(target: Path) -> dict[str, str]:
    return {result["custom_id"]: result["response"]["body"]["choices"][0]["text"] for result in results(target)}


def again(source: Path, target: Path) -> Done:
    return run_batch(Engine(backend="numpy"), source, target)


@pytest.mark.slow
def test_failed_requests_are_computed_again_counted_and_told_by_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [line("a", prompt="1, 2,"), line("b", prompt="Monday,", model=ABSENT), line("c", prompt="Once")]
    source, target = written(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    command = ["batch", str(source), str(target), "--backend", "numpy"]
    assert run(command) == 1
    first, said = results(target), capsys.readouterr().err
    assert statuses(target) == [("a", 200), ("b", 404), ("c", 200)] and "3 requests, 0 of them done before, 1 f" in said
    assert run(command) == 1  # it fails again
    said = capsys.readouterr().err
    assert "b: 404: " in said and "3 requests, 2 of them done before, 1 failed run again, 1 failed" in said
    assert "1 of 3 requests failed" in said and statuses(target) == [("a", 200), ("b", 404), ("c", 200)]
    asked[1]["body"]["model"] = INSIDE
    written(source, asked)
    assert run(command) == 0
    assert "2 of them done before, 1 changed run again, 0 failed" in capsys.readouterr().err
    assert statuses(target) == [("a", 200), ("b", 200), ("c", 200)]  # in the order of the input
    assert [results(target)[i] for i in (0, 2)] == [first[i] for i in (0, 2)]
    assert run(command) == 0 and "3 of them done before, 0 failed" in capsys.readouterr().err


@pytest.mark.slow
def test_requests_that_were_changed_added_or_moved_get_their_own_results(tmp_path: Path) -> None:
    asked = [line(name, prompt=f"{name}: 1, 2,") for name in "abc"]
    source, target = written(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    again(source, target)
    before = texts(target)
    asked[0]["body"]["prompt"] = "A list of colors: red,"
    asked = [asked[2], line("d", prompt="Monday,"), asked[0], asked[1]]
    done = again(written(source, asked), target)
    assert (done.resumed, done.changed, done.again, done.failed) == (2, 1, 0, [])
    assert [result["custom_id"] for result in results(target)] == ["c", "d", "a", "b"]
    after = texts(target)
    assert (after["b"], after["c"]) == (before["b"], before["c"])
    with Engine(backend="numpy") as engine:
        assert after["a"] == engine.generate("A list of colors: red,", max_new_tokens=6).text != before["a"]


def test_an_interrupted_second_run_keeps_what_it_computed_and_the_newest_result_counts(tmp_path: Path) -> None:
    asked = [line(name, prompt="1, 2,") for name in "abc"]
    source, target = written(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"

    def result(request: dict[str, Any], status: int) -> dict[str, Any]:
        response = {"status_code": status, "body": {"error": {"message": "no"}} if status != 200 else {}}
        return {"id": id_of(request), "custom_id": request["custom_id"], "response": response, "error": None}

    a, b, c = read_batch(source)
    died = {"id": id_of(c), "custom_id": "c", "response": None, "error": {"message": "replicas have died"}}
    written(target, [result(a, 404), result(b, 200), died, result(a, 200)])
    target.write_bytes(target.read_bytes() + json.dumps(result(c, 200)).encode()[:-9])  # cut off
    requests, done = resumed(source, target)
    assert [request["custom_id"] for request in requests] == ["c"] and (done.resumed, done.again) == (2, 1)
    with results_file(source, target) as out:
        write_result(result(c, 200), out, done)
    assert statuses(target) == [("a", 200), ("b", 200), ("c", 200)] and done.failed == []


@pytest.mark.slow
def test_results_of_a_request_that_the_input_does_not_have_are_not_touched(tmp_path: Path) -> None:
    asked = [line("a", prompt="1, 2,"), line("b", prompt="Monday,")]
    source, target = written(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    again(source, target)
    before = target.read_bytes()
    assert run(["batch", str(written(source, asked[1:])), str(target), "--backend", "numpy"]) == 2
    assert target.read_bytes() == before
