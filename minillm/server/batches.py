"""Files of many requests: OpenAI's batch format in, its results out.

A line of the input is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}, a line of the
output {"id": ..., "custom_id": ..., "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}
(OpenAI's API reference, "Batch": the request input and output objects). The requests go through the application of the
server without a socket, so that bodies mean what they mean over HTTP, and run in the engine's batch side by side.

The output has the order of the input, and is written line by line: after an interruption the same command goes on where
it ended. Requests that failed, or have changed since, are run again: their new results are appended, and the file is
put into the order of the input when all are there. `replicas.py` does the same with several engines.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ..engine.engine import Engine
from ..errors import UsageError, shown
from ..output_files import write_file
from ..progress import work
from . import Limits, make_app

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
AT_ONCE = 64
"""Requests that are given to the engine at a time; it queues those that its batch does not hold"""


@dataclass
class Done:
    """The outcome of a file."""

    requests: int
    """In the input"""
    resumed: int = 0
    """Results that were in the output before, and stay"""
    again: int = 0
    """Requests that had failed in an earlier run, and are run again"""
    changed: int = 0
    """Requests that are others than those whose results were in the output, and are run again"""
    failed: list[tuple[str, int, str]] = field(default_factory=list)
    """custom_id, status and message of each request that failed in this run; 500 of one that ended its replicas"""


def read_batch(path: Path) -> list[dict[str, Any]]:
    """The requests of a file.

    Raises:
        UsageError: the file cannot be read, a line is no request of this form, or two have the same custom_id.
    """
    requests, seen = [], set()
    for number, line in _lines(path):
        where = f"{path}: line {number}"
        try:
            request = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where} is not JSON: {error}") from None
        if not isinstance(request, dict) or not isinstance(request.get("body"), dict):
            raise UsageError(f"{where} should be an object with custom_id, method, url and body")
        name = request.get("custom_id")
        if not isinstance(name, str) or not name or name in seen:
            raise UsageError(f"{where}: custom_id should be text that no other line has, found {shown(name)}")
        if request.get("method") != "POST" or request.get("url") not in URLS:
            raise UsageError(
                f"{where}: method should be 'POST' and url one of {', '.join(URLS)}, found "
                f"{shown(request.get('method'))} and {shown(request.get('url'))}"
            )
        if request["body"].get("stream"):
            raise UsageError(f"{where}: stream has no effect in a batch: leave it out")
        if unknown := request.keys() - {"custom_id", "method", "url", "body"}:
            raise UsageError(f"{where}: there is no field {shown(min(unknown))}")
        seen.add(name)
        requests.append(request)
    return requests


def run_batch(engine: Engine, source: Path, target: Path) -> Done:
    """Run the requests of a file, and write their results to another, in the same order.

    Args:
        engine: runs them; closed at the end
        source: the input
        target: the output. Results that it has are kept and not computed again. Requests that failed or have changed
            since are, and a line that was cut off by an interruption

    Raises:
        UsageError: as `read_batch`, or the output has results of other requests.
    """
    requests, done = resumed(source, target)
    with results_file(source, target) as out:
        asyncio.run(_run(engine, requests, out, done))
    return done


def resumed(source: Path, target: Path) -> tuple[list[dict[str, Any]], Done]:
    """The requests of a file that its output has no good results of yet, and what has been done.

    Raises:
        UsageError: as `run_batch`.
    """
    requests = read_batch(source)
    results, done = _resume(target, {request["custom_id"] for request in requests}), Done(len(requests))
    left = []
    for request in requests:
        result = results.get(request["custom_id"])
        failed, changed = result is not None and _failed(result), result is not None and _changed(result, request)
        if result is None or failed or changed:
            left.append(request)
        done.resumed += result is not None and not failed and not changed
        done.again += failed and not changed
        done.changed += changed
    return left, done


@contextmanager
def results_file(source: Path, target: Path) -> Iterator[TextIO]:
    """An output, open for further results; at the end of the `with` block it is put into the order of the input."""
    with target.open("a", encoding="utf-8") as out:
        yield out
    lines = target.read_bytes().splitlines(keepends=True)
    names = [json.loads(line)["custom_id"] for line in lines]
    last = dict(zip(names, lines, strict=True))
    ordered = [request["custom_id"] for request in read_batch(source) if request["custom_id"] in last]
    if names != ordered:
        write_file(target, b"".join(last[name] for name in ordered))


def id_of(request: dict[str, Any]) -> str:
    """The id of a request's result, which tells whether the result belongs to this request."""
    return f"batch_req_{hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:32]}"


def write_result(result: dict[str, Any], out: TextIO, done: Done) -> None:
    """Write the next line of an output, and take up what failed."""
    out.write(json.dumps(result, ensure_ascii=False) + "\n")
    out.flush()
    if _failed(result):
        response = result["response"] or {"status_code": 500, "body": result}
        message = (response["body"].get("error") or {}).get("message", "")
        done.failed.append((result["custom_id"], response["status_code"], message))


def _failed(result: dict[str, Any]) -> bool:
    return (result.get("response") or {}).get("status_code") != 200


def _changed(result: dict[str, Any], request: dict[str, Any]) -> bool:
    """Whether a result of ours belongs to another request of the same name."""
    name = str(result.get("id"))
    return name.startswith("batch_req_") and name != id_of(request)


def _resume(target: Path, names: set[str]) -> dict[str, dict[str, Any]]:
    """The newest result of each request that the output has one of; a last line without an end is cut off."""
    if not target.exists():
        return {}
    data = target.read_bytes()
    whole = data.rfind(b"\n") + 1
    results = {}
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            result = json.loads(line)
            name = result["custom_id"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{target}: line {number} is not the result of a batch: name another output") from None
        if name not in names:
            raise UsageError(
                f"{target}: line {number} is the result of another request, {shown(name)}, than those of the input: "
                "name another output"
            )
        results[name] = result
    if whole < len(data):
        os.truncate(target, whole)
    return results


async def _run(engine: Engine, requests: list[dict[str, Any]], out: TextIO, done: Done) -> None:
    app, slots = make_app(engine, max_waiting=AT_ONCE * Limits().max_prompts), asyncio.Semaphore(AT_ONCE)

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        async with slots:
            return await answer_of(app, request)

    tasks = [asyncio.create_task(answer(request)) for request in requests]
    try:
        with work("running requests", len(requests), "requests") as progress:
            for task in tasks:
                write_result(await task, out, done)
                progress.advance()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await app.state.server.close()


async def answer_of(app: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Send one request to the server's application. Returns its line of the output."""
    request_id, body = id_of(request), json.dumps(request["body"]).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request["url"],
        "raw_path": request["url"].encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
        "client": None,
        "server": None,
    }
    incoming = iter([{"type": "http.request", "body": body, "more_body": False}])
    status, pieces = 0, []

    async def receive() -> dict[str, Any]:
        message = next(incoming, None)
        if message is None:
            await asyncio.Event().wait()  # the client stays
        assert message is not None
        return message

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    response = {"status_code": status, "request_id": request_id, "body": json.loads(b"".join(pieces))}
    return {"id": request_id, "custom_id": request["custom_id"], "response": response, "error": None}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not blank, with their numbers."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} should be UTF-8 text; byte {error.start} is not") from None
