"""Limits: keys, sizes, counts, the queue, seconds, origins; and what the log says."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import httpx
import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.decoding.event import Event
from minillm.server import Limits, make_app
from minillm.server.metrics import ModelMetrics, RequestMetrics

from .client import error_of, get, post, talk

T = TypeVar("T")
COMPLETIONS = "/v1/completions"
LONG = {"prompt": "A", "max_tokens": 150, "ignore_eos": True}
SHORT = {"prompt": "A", "max_tokens": 2}


@pytest.fixture(scope="module")
def limited(demo: Engine) -> Starlette:
    limits = Limits(max_body_bytes=2000, max_prompt_tokens=20, max_prompts=3, max_n=2, max_logprobs=1)
    return make_app({"demo": demo}, limits=limits, keys=["one", "two"], cors_origins=["http://page.example"])


KEY = {"Authorization": "Bearer two"}


def test_a_key_opens_every_path_but_the_open_ones(limited: Starlette) -> None:
    for path in ("/v1/models", "/metrics", "/version", "/tokenizer_info", "/nothing"):
        for headers in (
            {},
            {"Authorization": "Bearer three"},
            {"Authorization": "two"},
            {"Authorization": "Basic two"},
        ):
            response = get(limited, path, headers=headers)
            error = error_of(response, 401)
            assert error["code"] == "invalid_api_key" and response.headers["www-authenticate"] == "Bearer"
        assert get(limited, path, headers=KEY).status_code in (200, 404)
        assert get(limited, path, headers={"authorization": "bearer one"}).status_code in (200, 404)
    assert get(limited, "/health").status_code == 200
    assert error_of(post(limited, COMPLETIONS, SHORT), 401)
    assert post(limited, COMPLETIONS, SHORT, headers=KEY).status_code == 200
    assert error_of(get(limited, "/health/../v1/models"), 401)
    assert error_of(get(limited, "/v1/models", headers={"Authorization": "Bearer \xe9".encode("latin-1")}), 401)  # type: ignore[dict-item]


def test_the_time_of_a_wrong_key_does_not_depend_on_it(limited: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare)
    get(limited, "/version", headers={"Authorization": "Bearer one"})
    assert [b for _, b in compared] == [b"one", b"two"]  # both, though the first is right


def test_sizes_and_counts(limited: Starlette) -> None:
    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(300):
            yield b" " * 10

    json = {"content-type": "application/json"} | KEY
    for content in (b" " * 3000, in_pieces()):
        response = talk(
            limited, lambda client, content=content: client.post(COMPLETIONS, content=content, headers=json)
        )
        error = error_of(response, 413)
        assert error["code"] == "request_too_large" and "2000" in error["message"]

    def refused(**fields: object) -> str:
        error = error_of(post(limited, COMPLETIONS, SHORT | fields, headers=KEY))
        return f"{error['param']}: {error['message']}"

    assert "20" in refused(prompt="word " * 30) and "20" in refused(prompt=[5] * 21)
    assert refused(prompt=["a"] * 4).startswith("prompt:")
    assert refused(n=3).startswith("n:") and refused(best_of=3).startswith("best_of:")
    assert refused(num_return_sequences=3).startswith("num_return_sequences:")
    assert refused(logprobs=2).startswith("logprobs:")
    assert post(limited, COMPLETIONS, SHORT | {"n": 2, "prompt": [[5] * 20] * 3}, headers=KEY).status_code == 200


def test_pages_of_other_sites(limited: Starlette, app: Starlette) -> None:
    asking = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    asking["Access-Control-Request-Headers"] = "authorization, content-type, x-stainless-lang"

    def preflight(app: Starlette, **headers: str) -> httpx.Response:
        return talk(app, lambda client: client.options(COMPLETIONS, headers=asking | headers))

    allowed = preflight(limited)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "http://page.example"
    assert preflight(limited, Origin="http://other.example").status_code == 400
    assert "access-control-allow-origin" not in preflight(app).headers
    assert (
        "access-control-allow-origin" not in get(app, "/v1/models", headers={"Origin": "http://page.example"}).headers
    )


def test_request_ids(app: Starlette) -> None:
    assert get(app, "/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    fresh = [get(app, "/health", headers=h).headers["x-request-id"] for h in ({}, {"X-Request-Id": "a b"}, {})]
    assert len(set(fresh)) == 3 and "a b" not in fresh
    assert get(app, "/nothing", headers={"X-Request-Id": "x" * 129}).headers["x-request-id"] != "x" * 129


# --- the queue and the clock ------------------------------------------------------------------------------------------


@pytest.fixture
def narrow() -> Iterator[Engine]:
    """An engine that runs one request at a time."""
    with Engine(max_batch_size=1) as engine:
        yield engine


async def before_a_step(
    engine: Engine, calls: Sequence[Coroutine[Any, Any, T]], *, queued: int, answered: int = 0
) -> list[T]:
    """Results of calls of which so many have been queued, and so many answered, before the next step runs."""
    with engine._driver.turn():
        tasks = [asyncio.create_task(call) for call in calls]
        for _ in range(10_000):
            if (engine._driver.waiting, sum(task.done() for task in tasks)) == (queued, answered):
                break
            await asyncio.sleep(0.001)
    return await asyncio.gather(*tasks)


@pytest.mark.longer
def test_a_full_queue(narrow: Engine) -> None:
    app = make_app(narrow, max_waiting=6)

    async def use(client: httpx.AsyncClient) -> list[httpx.Response]:
        first = asyncio.create_task(client.post(COMPLETIONS, json=LONG))
        while narrow.stats.steps < 2:
            await asyncio.sleep(0.001)
        rest = [client.post(COMPLETIONS, json=SHORT) for _ in range(12)]
        responses = await before_a_step(narrow, rest, queued=6, answered=6)
        assert (await first).status_code == 200
        return responses

    responses = talk(app, use)
    refused = [response for response in responses if response.status_code == 429]
    assert len(refused) == 6 and [r.status_code for r in responses if r not in refused] == [200] * 6
    for response in refused:
        assert error_of(response, 429)["code"] == "rate_limit_exceeded"
        assert 1 <= int(response.headers["retry-after"]) <= 60
    body = {"prompt": ["A"] * 7, "max_tokens": 2}  # a list is queued as a whole, which will never fit
    assert error_of(post(app, COMPLETIONS, body))["param"] == "prompt"
    assert post(app, COMPLETIONS, SHORT).status_code == 200


@pytest.mark.longer
def test_priority(narrow: Engine) -> None:
    app = make_app(narrow)

    async def use(client: httpx.AsyncClient) -> list[int]:
        ended: list[int] = []

        async def ask(priority: int) -> None:
            assert (await client.post(COMPLETIONS, json=SHORT | {"priority": priority})).status_code == 200
            ended.append(priority)

        first = asyncio.create_task(client.post(COMPLETIONS, json=LONG))
        while narrow.stats.steps < 2:
            await asyncio.sleep(0.001)
        await before_a_step(narrow, [ask(priority) for priority in (3, 1, 2, -5)], queued=4)
        await first
        return ended

    assert talk(app, use) == [-5, 1, 2, 3]


def test_time_for_one_request(demo: Engine) -> None:
    app = make_app(demo, limits=Limits(request_timeout=0.05))
    body = {"prompt": "A list of", "max_tokens": 500, "ignore_eos": True}
    for more in ({}, {"timeout": 100}, {"timeout": 0.001}):
        [choice] = post(app, COMPLETIONS, body | more).json()["choices"]
        assert choice["finish_reason"] == "timeout"
    assert post(app, COMPLETIONS, body | {"stream": True}).text.count('"finish_reason":"timeout"') == 1


# --- the log and the metrics ------------------------------------------------------------------------------------------


def test_the_log_has_one_line_for_a_request_and_no_text_of_it(app: Starlette, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minillm.access")
    body = {"prompt": "my secret", "max_tokens": 3, "stop": "secret", "user": "secret"}
    post(app, COMPLETIONS, body | {"stream": True}, headers={"X-Request-Id": "one"})
    post(app, COMPLETIONS, body | {"secret": "secret"}, headers={"X-Request-Id": "two"})
    post(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "secret"}], "max_tokens": 1})
    get(app, "/v1/models?key=secret", headers={"X-Request-Id": "\x1b[31m"})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4 and "secret" not in " ".join(lines) and "\x1b" not in " ".join(lines)
    assert "POST /v1/completions 200 prompt=" in lines[0] and "generated=3" in lines[0] and lines[0].endswith("ms one")
    assert "POST /v1/completions 400" in lines[1] and "GET /v1/models 200" in lines[3]


def values_of(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_the_time_between_tokens_is_that_of_each_sequence_and_shared_by_tokens_that_come_together() -> None:
    metrics = ModelMetrics()
    request = RequestMetrics(metrics, prompt_tokens=3, arrived=10.0)
    for index, token_ids, now in ((0, (5,), 10.25), (1, (5,), 10.5), (0, (6,), 11.0), (1, (6, 7), 11.5), (0, (), 20.0)):
        request.see(Event(1, index, "", token_ids), now)
    seen = {name: (sum(each.counts), each.sum) for name, each in metrics.histograms.items() if sum(each.counts)}
    assert seen == {"time_to_first_token_seconds": (1, 0.25), "inter_token_latency_seconds": (3, 0.75 + 2 * 0.5)}


def test_metrics_count_what_happened(demo: Engine) -> None:
    app = make_app({"demo": demo})
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "n": 2}
    post(app, COMPLETIONS, body)
    post(app, COMPLETIONS, body | {"stream": True})
    post(app, COMPLETIONS, {"prompt": []})
    get(app, "/any/path")
    response = get(app, "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = values_of(response.text)

    def value(name: str, **labels: str) -> float:
        inside = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
        return found[f"minillm:{name}{{{inside}}}"]

    model = {"model_name": "demo"}
    assert value("prompt_tokens_total", **model) == 6 and value("generation_tokens_total", **model) == 16
    assert value("request_success_total", finished_reason="length", **model) == 4
    assert value("num_requests_running", **model) == value("num_requests_waiting", **model) == 0
    assert 0 <= value("kv_cache_usage_perc", **model) < 1
    page = 4 * 2 * demo.config.num_layers * demo.config.num_heads * demo.config.head_dim * demo.runner.cache.page_size
    assert value("kv_cache_max_bytes", **model) == page * demo.runner.cache.num_pages
    assert page <= value("kv_cache_bytes", **model) <= value("kv_cache_max_bytes", **model)
    made = {"cache_dtype": "float32", "block_size": "128", "num_gpu_blocks": str(demo.runner.cache.num_pages)}
    assert value("cache_config_info", **made, **model) == 1
    assert found["process_resident_memory_bytes"] > 2**25
    for name, count in {
        "time_to_first_token_seconds": 2,
        "e2e_request_latency_seconds": 2,
        "request_queue_time_seconds": 2,
        "request_prompt_tokens": 2,
    }.items():
        assert value(f"{name}_bucket", le="+Inf", **model) == value(f"{name}_count", **model) == count
    gaps = value("inter_token_latency_seconds_count", **model)  # none if a busy machine reads all tokens at once
    assert gaps <= 12 and value("inter_token_latency_seconds_bucket", le="+Inf", **model) == gaps
    assert value("http_requests_total", path=COMPLETIONS, status="200") == 2
    assert value("http_requests_total", path=COMPLETIONS, status="400") == 1
    assert value("http_requests_total", path="other", status="404") == 1
    fresh = values_of(get(make_app({"other": demo}), "/metrics").text)
    assert fresh['minillm:prompt_tokens_total{model_name="other"}'] == 0  # known before the first request
