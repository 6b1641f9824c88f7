"""Models of a folder: loaded on request, unloaded when idle or where there is no room, never with requests."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.errors import UsageError
from minillm.server import make_app
from minillm.server.http_json import ApiError
from minillm.server.model_pool import FOREVER, ModelPool, keep_alive_seconds, stored_models

from ..tiny import write_checkpoint
from .client import TEMPLATE, error_of, until

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for number, name in enumerate(("first", "org/second", "third")):
        write_checkpoint(folder / name, seed=number)
    broken = write_checkpoint(folder / "broken", seed=4)
    (broken / "model.safetensors").write_bytes(b"nothing")
    return folder


class Loads:
    """Makes engines and notes of what; each waits while `gate` is closed."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, path: Path) -> Engine:
        self.names.append(path.name)
        assert self.gate.wait(20)
        engine = Engine(path, max_batch_size=2, progress=False)
        engine.chat_template = TEMPLATE
        return engine


@pytest.fixture
def loads() -> Loads:
    return Loads()


def run(app: Starlette, use: Callable[[httpx.AsyncClient, ModelPool], Any]) -> None:
    """Use a client in one event loop, and close the server in it."""

    async def work() -> None:
        server = app.state.server
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client:
            try:
                await use(client, server.pool)
            finally:
                await server.close()

    asyncio.run(work())


async def complete(client: httpx.AsyncClient, model: str | None, count: int = 2) -> httpx.Response:
    named = {} if model is None else {"model": model}
    return await client.post(COMPLETIONS, json=named | {"prompt": [5, 6, 7], "max_tokens": count, "temperature": 0})


def test_names_are_paths_in_the_folder(folder: Path, tmp_path: Path) -> None:
    models = stored_models(folder)
    assert [*models] == ["broken", "first", "org/second", "third"]
    files = [path.stat().st_size for path in (folder / "first").iterdir()]
    assert models["first"].bytes == sum(files)
    with pytest.raises(UsageError, match="has no models"):
        stored_models(tmp_path)
    with pytest.raises(UsageError, match="there is no folder"):
        stored_models(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is a model itself"):
        stored_models(folder / "first")


@pytest.mark.longer
def test_a_request_loads_its_model_once(folder: Path, loads: Loads) -> None:
    app = make_app({}, stored=stored_models(folder), load=loads)

    async def use(client: httpx.AsyncClient, pool: ModelPool) -> None:
        loads.gate.clear()
        waiting = [asyncio.create_task(complete(client, "first")) for _ in range(3)]
        await until(lambda: bool(loads.names))
        loads.gate.set()
        texts = {(await answer).json()["choices"][0]["text"] for answer in waiting}
        assert len(texts) == 1
        with Engine(folder / "first") as engine:
            expected = engine.generate([5, 6, 7], max_new_tokens=2)
        assert texts == {expected.text}
        other = await complete(client, "org/second")
        assert (other.status_code, loads.names) == (200, ["first", "second"])
        assert set(pool.loaded) == {"first", "org/second"}
        listed = (await client.get("/v1/models")).json()["data"]
        status = {card["id"]: card["status"]["value"] for card in listed}
        expected_status = dict.fromkeys(status, "unloaded") | {"first": "loaded", "org/second": "loaded"}
        assert status == expected_status and len(status) == 4
        assert "max_model_len" in listed[1] and "max_model_len" not in listed[3]

    run(app, use)


@pytest.mark.longer
def test_a_model_that_is_unknown_unnamed_or_broken_is_told(folder: Path, loads: Loads) -> None:
    app = make_app({}, stored=stored_models(folder), load=loads)

    async def use(client: httpx.AsyncClient, pool: ModelPool) -> None:
        message = error_of(await complete(client, "fourth"), 404)["message"]
        assert all(name in message for name in ("fourth", "first", "org/second", "third"))
        assert "name one of" in error_of(await complete(client, None))["message"]
        for _ in range(2):  # the second try loads it again, and tells it again
            error = error_of(await complete(client, "broken"), 500)
            assert error["code"] == "model_not_loaded" and "broken" in error["message"]
        assert (await complete(client, "first")).status_code == 200
        assert (await complete(client, None)).json()["model"] == "first"

    run(app, use)


@pytest.mark.longer
def test_an_idle_model_is_unloaded(folder: Path, loads: Loads) -> None:
    app = make_app({}, stored=stored_models(folder), load=loads, idle_timeout=0.2)

    async def use(client: httpx.AsyncClient, pool: ModelPool) -> None:
        assert (await complete(client, "first")).status_code == 200
        weights = weakref.ref(pool.loaded["first"].engine.runner.model)
        await until(lambda: not pool.loaded)
        await until(lambda: weights() is None)
        assert (await complete(client, "first")).status_code == 200
        assert loads.names == ["first", "first"]

    run(app, use)


@pytest.mark.longer
def test_a_model_with_a_request_stays(folder: Path, loads: Loads) -> None:
    app = make_app({}, stored=stored_models(folder), load=loads, idle_timeout=0.0, max_loaded=1)

    async def use(client: httpx.AsyncClient, pool: ModelPool) -> None:
        held = await pool.take("first")
        try:
            await asyncio.sleep(0.05)
            assert pool.loaded["first"] is held
            refused = await complete(client, "third")
            error = error_of(refused, 503)
            assert error["code"] == "model_overloaded" and "first" in error["message"]
            assert refused.headers["Retry-After"] == "5"
        finally:
            pool.release("first")
        await until(lambda: not pool.loaded)
        assert (await complete(client, "third")).status_code == 200

    run(app, use)


@pytest.mark.longer
def test_the_model_used_longest_ago_makes_room(folder: Path, loads: Loads) -> None:
    stored = stored_models(folder)

    def free() -> int:
        """Of two models no third one fits."""
        return 10**9 if len(pool.loaded) < 2 else stored["third"].bytes

    pool = ModelPool(stored, lambda model: make_served(loads, model.path), idle_timeout=FOREVER, free=free)

    async def use() -> None:
        for name in ("first", "org/second", "first", "third"):
            await pool.take(name)
            pool.release(name)
            await asyncio.sleep(0.002)
        assert set(pool.loaded) == {"first", "third"}
        await pool.close()

    asyncio.run(use())


def make_served(loads: Loads, path: Path) -> Any:
    """A model as the server makes it of an engine."""
    return make_app({path.name: loads(path)}).state.server.fixed[path.name]


@pytest.mark.longer
def test_a_client_that_leaves_while_its_model_is_loaded_does_not_hold_it(folder: Path, loads: Loads) -> None:
    app = make_app({}, stored=stored_models(folder), load=loads, idle_timeout=0.05)

    async def use(client: httpx.AsyncClient, pool: ModelPool) -> None:
        loads.gate.clear()
        taking = asyncio.create_task(pool.take("first"))
        await until(lambda: bool(loads.names))
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        loads.gate.set()
        await until(lambda: "first" in pool.loaded)
        await until(lambda: not pool.loaded)

    run(app, use)


@pytest.mark.longer
@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_keep_alive(folder: Path, loads: Loads, stream: bool) -> None:
    app = make_app({}, stored=stored_models(folder), load=loads)

    async def use(client: httpx.AsyncClient, pool: ModelPool) -> None:
        body = {"model": "first", "prompt": "a", "stream": stream, "options": {"num_predict": 2}}

        async def ask(keep_alive: Any) -> httpx.Response:
            return await client.post("/api/generate", json=body | {"keep_alive": keep_alive})

        assert (await ask(-1)).status_code == 200
        [running] = (await client.get("/api/ps")).json()["models"]
        assert running["expires_at"].startswith("9999")
        assert (await ask("10m")).status_code == 200
        assert 590 < pool.expires("first") <= 600
        assert (await ask("soon")).status_code == 400
        assert (await ask(0)).status_code == 200
        await until(lambda: not pool.loaded)
        load = await client.post("/api/generate", json={"model": "third", "keep_alive": "1h"})
        assert (load.json()["done_reason"], [*pool.loaded]) == ("load", ["third"])
        names = {card["name"]: card["size"] for card in (await client.get("/api/tags")).json()["models"]}
        assert set(names) == set(pool.stored) and all(names.values())
        unload = await client.post("/api/generate", json={"model": "third", "keep_alive": 0})
        assert unload.json()["done_reason"] == "unload"
        await until(lambda: not pool.loaded)

    run(app, use)


def test_durations_are_gos() -> None:
    seconds = {300: 300, "300": 300, "5m": 300, "1h30m": 5400, "1.5h": 5400, "250ms": 0.25, 0: 0, "0": 0, "0s": 0}
    assert {value: keep_alive_seconds(value) for value in seconds} == pytest.approx(seconds)
    assert keep_alive_seconds(-1) == keep_alive_seconds("-1m") == FOREVER
    for value in ("soon", "5 m", "", True, [5], float("nan")):
        with pytest.raises(ApiError, match="keep_alive"):
            keep_alive_seconds(value)


@pytest.mark.longer
def test_models_that_stay_are_beside_those_of_a_folder(folder: Path, loads: Loads) -> None:
    with Engine(folder / "third", max_batch_size=2) as engine:
        app = make_app({"fixed": engine}, stored=stored_models(folder), load=loads, idle_timeout=0.0)

        async def use(client: httpx.AsyncClient, pool: ModelPool) -> None:
            assert (await complete(client, None)).json()["model"] == "fixed"
            assert (await complete(client, "first")).json()["model"] == "first"
            await until(lambda: not pool.loaded)
            kept = await client.post("/api/generate", json={"model": "fixed", "prompt": "a", "keep_alive": 0})
            assert kept.status_code == 200
            assert (await complete(client, "fixed")).status_code == 200
            shown = (await client.get("/inspect/models?model=first")).json()["models"]
            assert [model["name"] for model in shown if "layers" in model] == ["first", "fixed"]
            assert {model["name"] for model in shown} == {"fixed", *pool.stored}

        run(app, use)
    with pytest.raises(UsageError, match="two models are called"), Engine(folder / "third") as engine:
        make_app({"first": engine}, stored=stored_models(folder))
