"""Ollama's API as its clients use it: every option of its documentation, log-probabilities, vectors, sizes."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.decoding.foreign import OLLAMA_OPTIONS, WORDS, ignored
from minillm.formats.gguf.write import write_gguf
from minillm.server import make_app
from minillm.server.ollama import _log_once
from minillm.server.ollama_models import parameters_text

from ..gguf_files import write_llama
from ..server.client import TEMPLATE, error_of, get, post
from ..task_models import BERT, write_task_model

ollama = pytest.importorskip("ollama", reason="the official client is not installed")

T = TypeVar("T")
TALK = [{"role": "user", "content": "Hi"}]
COLD: dict[str, Any] = {"temperature": 0, "num_predict": 6}
ASKED: dict[str, Any] = {"model": "demo", "messages": TALK, "stream": False}
DOCUMENTED: dict[str, Any] = {
    "num_keep": 5,
    "seed": 42,
    "num_predict": 3,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 0.7,
    "repeat_last_n": 33,
    "temperature": 0.8,
    "repeat_penalty": 1.2,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.0,
    "penalize_newline": True,
    "stop": ["\n", "user:"],
    "numa": False,
    "num_ctx": 1024,
    "num_batch": 2,
    "num_gpu": 1,
    "main_gpu": 0,
    "use_mmap": True,
    "num_thread": 8,
    "low_vram": False,
    "f16_kv": True,
    "logits_all": False,
    "vocab_only": False,
    "use_mlock": False,
    "embedding_only": False,
    "tfs_z": 0.5,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
}
"""The request with all options of docs/api.md, and those of the official client besides"""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    folder = tmp_path_factory.mktemp("models")
    vectors = write_task_model(folder / "vectors", BERT)
    write_llama(folder / "plain.gguf")
    write_gguf(folder / "plain.gguf", folder / "demo.gguf", "int8", progress=False)
    made = {"demo": Engine(max_batch_size=4), "vectors": Engine(vectors), "file": Engine(folder / "demo.gguf")}
    made["demo"].chat_template = TEMPLATE
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="module")
def app(engines: dict[str, Engine]) -> Starlette:
    return make_app(engines)


def answered(app: Starlette, path: str, **body: Any) -> Any:
    response = post(app, path, body)
    assert response.status_code == 200, response.text
    return response.json()


def with_client(app: Starlette, use: Callable[[Any], Awaitable[T]]) -> T:
    """Use the official client."""

    async def run() -> T:
        client = ollama.AsyncClient(host="http://test", transport=httpx.ASGITransport(app))
        async with client._client:
            return await use(client)

    return asyncio.run(run())


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.longer
def test_all_options_of_the_documentation_are_taken(app: Starlette) -> None:
    assert DOCUMENTED.keys() == ollama.Options.model_fields.keys() | {"min_p"}
    assert WORDS[OLLAMA_OPTIONS].keys() | {"num_predict", "num_ctx", "repeat_last_n"} >= DOCUMENTED.keys()
    assert answered(app, "/api/chat", **ASKED, options=DOCUMENTED)["done"]
    for mirostat in (0, 1, 2):
        assert answered(app, "/api/chat", **ASKED, options=DOCUMENTED | {"mirostat": mirostat})["done"]


def test_options_about_running_change_nothing(app: Starlette) -> None:
    plain = answered(app, "/api/chat", **ASKED, options=COLD)["message"]
    for more in (
        dict.fromkeys(ignored(OLLAMA_OPTIONS), 3),
        {"repeat_last_n": 0, "repeat_penalty": 9.0},
        {"num_ctx": 0, "seed": -1},
    ):
        assert answered(app, "/api/chat", **ASKED, options=COLD | more)["message"] == plain
    fields = {"keep_alive": 0, "think": False, "format": "", "truncate": True, "shift": False, "logprobs": False}
    assert answered(app, "/api/chat", **ASKED, **fields, options=COLD, tools=[])["message"] == plain
    message = TALK[0] | {"images": [], "thinking": "hm"}
    assert answered(app, "/api/chat", **ASKED | {"messages": [message]}, options=COLD)["message"] == plain


def test_a_context_that_is_too_large_is_the_models_and_said_once(
    app: Starlette, caplog: pytest.LogCaptureFixture
) -> None:
    _log_once.cache_clear()
    plain = answered(app, "/api/chat", **ASKED, options=COLD)["message"]
    with caplog.at_level(logging.WARNING, "minillm.server"):
        for context in (16384, 10**9, 512):
            assert answered(app, "/api/chat", **ASKED, options=COLD | {"num_ctx": context})["message"] == plain
    [line] = [record.getMessage() for record in caplog.records]
    assert "num_ctx is above the context of demo, 512" in line


@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", [0, -1, -2, None, 10**6])
def test_a_length_of_nothing_or_too_much_goes_on_to_the_end(app: Starlette, engines: Any, length: int | None) -> None:
    """As in Ollama, whose runner counts only a num_predict above 0."""
    options = {"temperature": 0, "num_predict": length, "stop": ["no such text"]}
    body = {"model": "demo", "prompt": "A list of colors:", "raw": True, "stream": False}
    found = answered(app, "/api/generate", **body, options=options)
    whole = engines["demo"].generate(body["prompt"], do_sample=False, max_new_tokens=400)
    assert (found["response"], found["eval_count"]) == (whole.text, len(whole.token_ids))


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_a_chat(app: Starlette) -> None:
    chat = {"model": "demo", "messages": TALK, "temperature": 0, "max_tokens": 6}
    for top in (0, 3):
        expected = answered(app, "/v1/chat/completions", **chat, logprobs=True, top_logprobs=top)
        more: dict[str, Any] = {"logprobs": True, "top_logprobs": top, "options": COLD}

        async def use(client: Any, more: dict[str, Any] = more) -> Any:
            whole = await client.chat(model="demo", messages=TALK, **more)
            lines = [line async for line in await client.chat(model="demo", messages=TALK, stream=True, **more)]
            alone = await client.generate(model="demo", prompt="Hi", **more)
            return whole, lines, alone

        whole, lines, alone = with_client(app, use)
        content = expected["choices"][0]["logprobs"]["content"]
        assert [one.token for one in whole.logprobs] == [one["token"] for one in content]
        assert [one.logprob for one in whole.logprobs] == [one["logprob"] for one in content]
        tops = [[(token.token, token.logprob) for token in one.top_logprobs or ()] for one in whole.logprobs]
        assert tops == [[(token["token"], token["logprob"]) for token in one["top_logprobs"]] for one in content]
        assert [one for line in lines for one in line.logprobs or ()] == whole.logprobs == alone.logprobs
    assert "logprobs" not in answered(app, "/api/chat", **ASKED, options=COLD)


# --- vectors ----------------------------------------------------------------------------------------------------------

TEXTS = ["the cat sat on the mat", "a dog"]


def test_vectors_have_the_length_of_one(app: Starlette, engines: dict[str, Engine]) -> None:
    async def use(client: Any) -> Any:
        one = await client.embed(model="vectors:latest", input=TEXTS[0])
        several = await client.embed(model="vectors", input=TEXTS, options={"num_ctx": 99}, keep_alive="1m")
        short = await client.embed(model="vectors", input=TEXTS, dimensions=3)
        old = await client.embeddings(model="vectors", prompt=TEXTS[1])
        return one, several, short, old

    one, several, short, old = with_client(app, use)
    expected = engines["vectors"].embed(TEXTS, normalize=True)
    np.testing.assert_allclose(several.embeddings, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one.embeddings, expected[:1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(short.embeddings, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(old.embedding, engines["vectors"].embed(TEXTS[1]), rtol=1e-5, atol=1e-6)
    assert several.prompt_eval_count == sum(len(text.token_ids) for text in engines["vectors"].encode(TEXTS))


def test_texts_that_are_too_long_are_cut_unless_the_client_forbids_it(app: Starlette) -> None:
    long = "the cat " * 5000
    assert answered(app, "/api/embed", model="vectors", input=long)["embeddings"]
    error = post(app, "/api/embed", {"model": "vectors", "input": long, "truncate": False})
    assert error.status_code == 400
    assert "tokens" in error.json()["error"]


def test_a_request_without_a_text_loads_the_model(app: Starlette) -> None:
    for nothing in ({}, {"input": ""}, {"input": []}):
        assert answered(app, "/api/embed", model="vectors", **nothing)["embeddings"] == []
    assert answered(app, "/api/embeddings", model="vectors", prompt="")["embedding"] == []
    for wrong in ({"input": 5}, {"input": ["a", 5]}, {"input": "a", "dimensions": 0}, {"input": "a", "nonsense": 1}):
        assert post(app, "/api/embed", {"model": "vectors"} | wrong).json().keys() == {"error"}


# --- models -----------------------------------------------------------------------------------------------------------


def test_models_are_listed_with_sizes_and_quantisation(app: Starlette, engines: dict[str, Engine]) -> None:
    async def use(client: Any) -> Any:
        return (await client.list()).models, (await client.ps()).models, await client.show("file")

    models, running, shown = with_client(app, use)
    cards = {model.model: model for model in models}
    file = engines["file"].path
    assert file is not None
    assert cards["file"].size == file.stat().st_size
    folder = engines["vectors"].path
    assert folder is not None
    assert cards["vectors"].size == (Path(folder) / "model.safetensors").stat().st_size
    assert (cards["file"].details.quantization_level, cards["file"].details.format) == ("Q8_0", "gguf")
    assert cards["demo"].details.format == "safetensors"
    assert len({model.digest for model in models}) == 3
    for name, model in cards.items():
        count = sum(math.prod(shape) for shape in shapes(engines[name]))
        assert model.details.parameter_size == parameters_text(count)
    assert [model.context_length for model in running if model.model == "demo"] == [512]
    info = shown.modelinfo
    config = engines["file"].config
    assert info["general.parameter_count"] == sum(math.prod(shape) for shape in shapes(engines["file"]))
    assert info[f"{info['general.architecture']}.embedding_length"] == config.hidden_size
    assert info[f"{info['general.architecture']}.block_count"] == config.num_layers


def shapes(engine: Engine) -> list[tuple[int, ...]]:
    from minillm.models import tensor_shapes

    return [*tensor_shapes(engine.config).values()]


def test_numbers_of_parameters_are_written_as_ollama_writes_them() -> None:
    for count, text in ((8_030_261_248, "8.0B"), (134_515_008, "134.52M"), (3_161_472, "3.16M"), (63_248, "63.25K")):
        assert parameters_text(count) == text


def test_the_tag_that_clients_add_is_no_part_of_the_name(app: Starlette) -> None:
    assert answered(app, "/api/show", model="demo:latest")["details"]
    assert error_of(get(app, "/v1/models/demo:1b"), 404)
