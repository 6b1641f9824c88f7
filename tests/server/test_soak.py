"""A soak: thousands of requests at once, good, malformed, broken off, failing and read slowly, on few pages.

Nothing is lost or mixed up: each answer is the one that an engine alone gives to the same request. Nothing is left
over: no page, id, task, thread, descriptor or object. No status above 499 but for the failures that were planted.
"""

import asyncio
import gc
import http.client
import io
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the server needs the extra serve")
pytest.importorskip("llguidance", reason="guides need the extra guided")

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from minillm import AsyncEngine, Engine
from minillm.server import make_app

from .client import TEMPLATE, listening, until

PAGE, PAGES = 16, 16
"""Positions of a page, and pages: too few for a full batch, so that requests are preempted"""
BATCH, WAITING, WORKERS = 16, 24, 40
"""Sequences at once, requests in the queue, clients: more than both, so that some are refused and try again"""
RAISES, NAN = 666_001, 666_002
"""Seeds for which the server's engine fails: a logits processor raises, or makes NaN of the logits"""
SHARES = {"malformed": 0.05, "broken off": 0.05, "failing": 0.02, "slow": 0.02}

LONGEST = 100
"""Seconds after which a request counts as lost"""
TOO_LARGE = {"type": "array", "items": {"anyOf": [{"type": "string", "maxLength": n} for n in range(1, 401)]}}
"""A schema that is accepted, and fails in a step"""
DESCRIPTORS = Path("/proc/self/fd")

PROMPTS = (
    "A list of colors: red,",
    "Count from 3 to 9:",
    "Once upon a time there was a gentle frog named Sam.",
    "Q: What is the capital of France?\nA:",
    "What is 3 plus 4?",
    "Here is a list of animals: cat,",
    "Ben is 7 years old, lives in Rome and likes maps. As JSON:",
    "Monday, Tuesday,",
)


@dataclass(frozen=True)
class Case:
    """A request to the server, and the same one to an engine."""

    path: str
    body: dict[str, Any]
    calls: list[Callable[[Engine], Any]]
    """One for each prompt; gives its `Generation`"""
    alternatives: int = 0
    """Number of alternatives whose log-probabilities are compared"""


def cases(prompts: Sequence[str]) -> Iterator[Case]:
    """Requests of every kind, for each prompt."""
    for i, prompt in enumerate(prompts):
        length = 8 + 2 * i
        for body, fields in (
            ({"temperature": 0}, {}),
            ({"temperature": 0, "frequency_penalty": 0.7}, {"frequency_penalty": 0.7}),
            ({"temperature": 0, "stop": ["e", " o"]}, {"stop_strings": ["e", " o"]}),
            ({"temperature": 0, "logprobs": 3}, {"top_logprobs": 3}),
            ({"temperature": 0, "num_beams": 3}, {"num_beams": 3}),
            ({"temperature": 0, "guided_regex": "[a-z ]{5,20}"}, {"guided_regex": "[a-z ]{5,20}"}),
            ({"temperature": 0, "ignore_eos": True, "max_tokens": 60}, {"eos_token_id": [], "max_new_tokens": 60}),
            ({"seed": i}, {"do_sample": True, "seed": i}),
            (
                {"seed": i, "n": 3, "ignore_eos": True, "max_tokens": 56},
                {"do_sample": True, "seed": i, "num_return_sequences": 3, "eos_token_id": [], "max_new_tokens": 56},
            ),
            (
                {"seed": i, "temperature": 0.7, "top_p": 0.9},
                {"do_sample": True, "seed": i, "temperature": 0.7, "top_p": 0.9},
            ),
            ({"seed": i, "top_k": 5, "min_p": 0.01}, {"do_sample": True, "seed": i, "top_k": 5, "min_p": 0.01}),
        ):
            fields = {"top_k": 0} | fields if "seed" in fields else fields
            call = partial(Engine.generate, prompts=prompt, **{"max_new_tokens": length} | fields)
            alternatives = fields.get("top_logprobs", 0)
            yield Case("/v1/completions", {"prompt": prompt, "max_tokens": length, **body}, [call], alternatives)
        both = [prompt, PROMPTS[i - 1]]
        yield Case(
            "/v1/completions",
            {"prompt": both, "max_tokens": length, "temperature": 0},
            [partial(Engine.generate, prompts=one, max_new_tokens=length) for one in both],
        )
        messages = [{"role": "user", "content": prompt}]
        yield Case(
            "/v1/chat/completions",
            {"messages": messages, "max_tokens": length, "temperature": 0},
            [partial(Engine.chat, messages=messages, max_new_tokens=length)],
        )


MALFORMED: tuple[tuple[str, bytes, int], ...] = (
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b"[1]", 400),
    ("/v1/completions", b'{"prompt": []}', 400),
    ("/v1/completions", b'{"prompt": "a", "temperature": -1}', 400),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": "7"}', 400),
    ("/v1/completions", b'{"prompt": "a", "nonsense": 1}', 400),
    ("/v1/completions", b'{"prompt": "a", "prompt": "b"}', 400),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 100000}', 400),
    ("/v1/completions", b'{"prompt": "a", "stream": true, "logit_bias": {"x": 1}}', 400),
    ("/v1/completions", b'{"prompt": "\xff"}', 400),
    ("/v1/completions", b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}", 400),
    ("/v1/completions", json.dumps({"prompt": "a " * 3000}).encode(), 400),
    ("/v1/completions", b'{"prompt": "a", "model": "other"}', 404),
    ("/v1/completions", b'{"prompt": "a", "guided_regex": "("}', 400),
    ("/v1/chat/completions", b'{"messages": "hello"}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": 5}]}', 400),
    ("/v1/embeddings", b'{"input": "a"}', 404),
    ("/nowhere", b"{}", 404),
)


def raw_request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


class Reply:
    """A complete response."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        parsed = http.client.HTTPResponse(self)  # type: ignore[arg-type]
        parsed.begin()
        self.status, self.headers, self.body = parsed.status, parsed.headers, parsed.read()
        parsed.close()

    def makefile(self, *_: object) -> io.BytesIO:
        """What `http.client` reads of a socket."""
        return io.BytesIO(self.raw)


async def ask(port: int, request: bytes, *, slow: bool = False) -> Reply:
    """A request on a connection of its own, read to its end; if slowly, in small pieces through a small window."""
    with socket.socket() as client:
        client.setblocking(False)
        if slow:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=client, limit=2048 if slow else 65536)
        try:
            writer.write(request)
            pieces = []
            while piece := await reader.read(1024 if slow else 65536):
                pieces.append(piece)
                if slow:
                    await asyncio.sleep(0.002)
            writer.close()
            await writer.wait_closed()
        finally:
            writer.transport.abort()  # when its time is over: else the next socket of this number fails
    return Reply(b"".join(pieces))


async def leave(port: int, request: bytes, rng: Random) -> None:
    """A request whose client leaves: amid the body, at once, or after some of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    way = rng.randrange(3)
    writer.write(request[: -rng.randrange(1, 20)] if way == 0 else request)
    if way == 2:
        await reader.read(rng.randrange(1, 2000))
    else:
        await asyncio.sleep(rng.choice([0, 0.001, 0.02]))
    if rng.random() < 0.5:
        writer.transport.abort()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    lines = [line for line in body.split(b"\n\n") if line and not line.startswith(b":")]
    assert lines[-1] == b"data: [DONE]", body[-300:]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


@dataclass
class Choice:
    """One text of an answer, put together."""

    text: str = ""
    reason: str | None = None
    logprobs: list[float] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        """Append a choice of a response, or of a chunk."""
        message = choice.get("message") or choice.get("delta") or choice
        self.text += message.get("text") or message.get("content") or ""
        self.reason = choice["finish_reason"] or self.reason
        if choice.get("logprobs"):
            self.logprobs += choice["logprobs"]["token_logprobs"]


def choices_of(responses: list[dict[str, Any]]) -> list[Choice]:
    """The texts of a response, or of the chunks of a stream, by index."""
    found: dict[int, Choice] = {}
    for response in responses:
        for choice in response["choices"]:
            found.setdefault(choice["index"], Choice()).add(choice)
    assert sorted(found) == list(range(len(found)))
    return [found[index] for index in range(len(found))]


def expected_of(case: Case, alone: Engine) -> tuple[list[Choice], int, int]:
    """What an engine alone answers: the texts, and the numbers of tokens of prompts and texts."""
    results = [call(alone) for call in case.calls]
    choices = [
        Choice(one.text, one.finish_reason, list(one.logprobs or ()))
        for result in results
        for one in result.completions
    ]
    prompts = sum(len(result.prompt_token_ids) for result in results)
    return choices, prompts, sum(len(one.token_ids) for result in results for one in result.completions)


class Soak:
    """The clients, and what they saw."""

    def __init__(self, port: int, alone: Engine, prompts: Sequence[str]) -> None:
        self.port = port
        self.cases = [(case, *expected_of(case, alone)) for case in cases(prompts)]
        self.failing = [
            {"prompt": PROMPTS[0], "max_tokens": 20, "seed": RAISES},
            {"prompt": PROMPTS[1], "max_tokens": 20, "seed": NAN, "n": 2},
            {"prompt": PROMPTS[2], "max_tokens": 20, "guided_json": TOO_LARGE},
        ]
        self.seen: Counter[str] = Counter()
        self.wrong: list[Exception] = []

    async def run(self, numbers: range) -> None:
        """Send the requests of these numbers, from so many clients at once."""
        remaining = iter(numbers)

        async def client() -> None:
            for number in remaining:
                try:
                    async with asyncio.timeout(LONGEST):
                        await self.one(Random(number))
                except (AssertionError, TimeoutError) as error:
                    self.wrong.append(error)

        await asyncio.gather(*(client() for _ in range(WORKERS)))
        assert not self.wrong, (len(self.wrong), self.wrong[:3])

    async def one(self, rng: Random) -> None:
        """One request; its number, the seed, decides its fate."""
        [fate] = rng.choices([*SHARES, "good"], [*SHARES.values(), 1 - sum(SHARES.values())])
        self.seen[fate] += 1
        if fate == "malformed":
            path, body, status = rng.choice(MALFORMED)
            reply = await self.answered(raw_request(path, body))
            assert reply.status == status, (path, body[:100], reply.body)
            assert json.loads(reply.body)["error"]["message"]
            return
        if fate == "failing":
            await self.fail(rng.choice(self.failing) | {"stream": rng.random() < 0.5})
            return
        case, choices, prompts, tokens = rng.choice(self.cases)
        stream = fate != "good" or rng.random() < 0.5
        body = case.body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
        request = raw_request(case.path, json.dumps(body).encode())
        if fate == "broken off":
            await leave(self.port, request, rng)
            return
        reply = await self.answered(request, slow=fate == "slow")
        assert reply.status == 200, reply.body
        responses = chunks_of(reply.body) if stream else [json.loads(reply.body)]
        found = choices_of(responses)
        assert [(one.text, one.reason) for one in found] == [(one.text, one.reason) for one in choices], case
        if case.alternatives:
            np.testing.assert_allclose(found[0].logprobs, choices[0].logprobs, atol=1e-3)
        usage = responses[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompts, tokens), case

    async def fail(self, body: dict[str, Any]) -> None:
        """A request that fails inside: status 500, or an error as the stream's last event."""
        reply = await self.answered(raw_request("/v1/completions", json.dumps(body).encode()))
        if body["stream"]:
            assert reply.status == 200
            error = chunks_of(reply.body)[-1]["error"]
        else:
            assert reply.status == 500, reply.body
            error = json.loads(reply.body)["error"]
        assert error["type"] == "server_error" and error["message"]

    async def answered(self, request: bytes, *, slow: bool = False) -> Reply:
        """The first reply that does not say that the queue is full."""
        pause = 0.1
        while (reply := await ask(self.port, request, slow=slow)).status == 429:
            self.seen["refused"] += 1
            assert int(reply.headers["retry-after"]) >= 1
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, 1.0)
        return reply


def planted(engine: Engine) -> None:
    """Make requests with certain seeds fail inside the engine."""

    def explode(history: Any, logits: Any, xp: Any) -> Any:
        raise RuntimeError("planted")

    def spoil(history: Any, logits: Any, xp: Any) -> Any:
        return logits * np.nan

    processors = {RAISES: [explode], NAN: [spoil]}
    requests = engine.requests

    def sabotaged(prompts: Any, config: Any = None, **fields: Any) -> Any:
        found = processors.get(config.seed)
        return requests(prompts, config, **fields, **({"logits_processor": found} if found else {}))

    engine.requests = sabotaged  # type: ignore[method-assign]


async def tasks(request: Request) -> JSONResponse:
    """The tasks in the server's event loop."""
    return JSONResponse(sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks()))


def running_tasks(port: int) -> list[str]:
    """The tasks of the server, among them that of this request."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/tasks", headers={"Connection": "close"})
    names: list[str] = json.loads(connection.getresponse().read())
    connection.close()
    return names


def descriptors() -> int:
    """Number of open files and sockets; 0 where the system does not say."""
    return len(list(DESCRIPTORS.iterdir())) if DESCRIPTORS.is_dir() else 0


def left_over(aio: AsyncEngine, port: int, idle: tuple[int, list[str]]) -> dict[str, Any]:
    """What there is once the engine and the server are done; `idle` are a fresh server's descriptors and tasks."""
    asyncio.run(until(lambda: aio.load().running + aio.load().waiting == 0))
    found = descriptors(), running_tasks(port)
    for _ in range(100):
        if found == idle:
            break
        time.sleep(0.05)
        found = descriptors(), running_tasks(port)
    gc.collect()
    load = aio.engine.load()
    return {
        "descriptors and tasks": found,
        "threads": threading.active_count(),
        "pages": load.total_pages - load.free_pages,
        "calls": len(aio._thread._calls),
        "requests": len(aio._thread._lives) + aio.engine.busy,
        "objects": len(gc.get_objects()),
    }


@pytest.mark.parametrize(
    ("count", "prompts"),
    [
        pytest.param(300, PROMPTS[2:4], marks=pytest.mark.slow),
        pytest.param(10_000, PROMPTS, marks=pytest.mark.exhaustive),
    ],
)
def test_nothing_is_lost_mixed_up_or_left_over(
    count: int, prompts: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine() as alone:
        alone.chat_template = TEMPLATE
        monkeypatch.setattr("minillm.backends.memory.Memory.page_size", PAGE)
        config = alone.config
        position = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim
        engine = Engine(max_batch_size=BATCH, cache_bytes=PAGES * PAGE * position, prefix_cache=True)
        assert engine.runner.cache.num_pages == PAGES
        engine.chat_template = TEMPLATE
        planted(engine)
        aio = AsyncEngine(engine, max_waiting=WAITING)
        with listening(make_app({"demo": aio}, routes=[Route("/tasks", tasks)])) as url:
            port = int(url.rpartition(":")[2])
            soak = Soak(port, alone, prompts)
            gc.collect()  # what earlier tests have left, closed now and not while this one counts
            idle = descriptors(), running_tasks(port)
            asyncio.run(soak.run(range(count // 2)))
            before = left_over(aio, port, idle)
            asyncio.run(soak.run(range(count // 2, count)))
            after = left_over(aio, port, idle)
            preemptions = engine.load().preemptions
    grown = after.pop("objects") - before.pop("objects")
    assert before == after
    assert after["descriptors and tasks"] == idle
    assert (after["pages"], after["calls"], after["requests"]) == (0, 0, 0)
    assert grown < max(500, 0.1 * count), "objects of requests that are over"
    assert soak.seen["good"] > 0.8 * count
    assert all(soak.seen[fate] for fate in SHARES)
    assert soak.seen["refused"] > 0
    assert preemptions > 0
