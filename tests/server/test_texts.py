"""/v1/embeddings, /classify, /score and /rerank: answers, limits and the queue; which endpoints a model has."""

import asyncio
import base64
import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.cli.serve import EXAMPLES
from minillm.errors import EngineStateError
from minillm.server import Limits, make_app
from minillm.server.batches import run_batch
from minillm.server.text_queue import AT_ONCE, TextQueue

from ..task_models import BERT, ONE_LABEL, T5, THREE_LABELS, write_task_model
from .client import chunks_of, error_of, get, listening, post, talk, until

TEXTS = ["the cat sat on the mat", "a dog", "the house is red"]
MODELS = {"vectors": BERT, "reranker": BERT | ONE_LABEL, "topics": BERT | THREE_LABELS, "t5": T5}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: Engine(write_task_model(folder / name, raw), max_batch_size=4) for name, raw in MODELS.items()}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="module")
def app(engines: dict[str, Engine]) -> Starlette:
    return make_app(engines)


def answered(app: Starlette, path: str, **body: Any) -> dict[str, Any]:
    response = post(app, path, body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


# --- /v1/embeddings ---------------------------------------------------------------------------------------------------


def test_vectors_are_the_engines_in_the_order_of_the_texts(app: Starlette, engines: dict[str, Engine]) -> None:
    found = answered(app, "/v1/embeddings", input=TEXTS)
    assert found.keys() == {"object", "data", "model", "usage"}
    assert [one["index"] for one in found["data"]] == [0, 1, 2]
    assert {one["object"] for one in found["data"]} == {"embedding"}
    vectors = [one["embedding"] for one in found["data"]]
    np.testing.assert_allclose(vectors, engines["vectors"].embed(TEXTS), atol=1e-4)
    tokens = sum(len(text.token_ids) for text in engines["vectors"].encode(TEXTS))
    assert (found["model"], found["usage"]) == ("vectors", {"prompt_tokens": tokens, "total_tokens": tokens})


def test_base64_dimensions_and_length_are_those_asked_for(app: Starlette, engines: dict[str, Engine]) -> None:
    found = answered(
        app, "/v1/embeddings", input=TEXTS, encoding_format="base64", dimensions=8, normalize=True, user="me"
    )
    vectors = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in found["data"]]
    expected = engines["vectors"].embed(TEXTS, dimensions=8, normalize=True)
    np.testing.assert_allclose(vectors, expected, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4)


@pytest.mark.parametrize(("dtype", "kind"), [("binary", np.int8), ("ubinary", np.uint8)])
def test_vectors_of_bits_are_packed_in_bytes(dtype: Any, kind: Any, app: Starlette, engines: dict[str, Engine]) -> None:
    expected = np.packbits(engines["vectors"].embed(TEXTS) > 0, axis=1)  # [N, 32] -> [N, 4]
    expected = expected if dtype == "ubinary" else expected.astype(int) - 128
    records = answered(app, "/v1/embeddings", input=TEXTS, output_dtype=dtype)["data"]
    assert [record["embedding"] for record in records] == expected.tolist()
    records = answered(app, "/v1/embeddings", input=TEXTS, output_dtype=dtype, encoding_format="base64")["data"]
    packed = [np.frombuffer(base64.b64decode(record["embedding"]), kind) for record in records]
    assert np.array(packed).tolist() == expected.tolist()


def test_token_ids_are_taken_as_they_are(app: Starlette, engines: dict[str, Engine]) -> None:
    ids = [text.token_ids for text in engines["vectors"].encode(TEXTS)]
    one = answered(app, "/v1/embeddings", input=ids[0])["data"][0]["embedding"]
    several = [each["embedding"] for each in answered(app, "/v1/embeddings", input=ids)["data"]]
    np.testing.assert_allclose(several, engines["vectors"].embed(TEXTS), atol=1e-4)
    np.testing.assert_allclose(one, several[0], atol=1e-4)


def test_a_long_text_is_refused_or_cut(app: Starlette, engines: dict[str, Engine]) -> None:
    long = "cat " * 100
    error = error_of(post(app, "/v1/embeddings", {"input": long}))
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "more than 64 tokens" in error["message"]
    found = answered(app, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert found["usage"]["total_tokens"] == 64
    np.testing.assert_allclose(found["data"][0]["embedding"], engines["vectors"].embed(long), atol=1e-4)


@pytest.mark.slow
def test_openais_client_gets_vectors(engines: dict[str, Engine]) -> None:
    openai = pytest.importorskip("openai", reason="the client is in the extra reference")
    app = make_app({"vectors": Engine(engines["vectors"].path)})  # closed with the server
    with listening(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        found = client.embeddings.create(model="vectors", input=TEXTS)  # asks for base64, and decodes it
        short = client.embeddings.create(model="vectors", input=TEXTS[0], dimensions=4, encoding_format="float")
    np.testing.assert_allclose([one.embedding for one in found.data], engines["vectors"].embed(TEXTS), atol=1e-4)
    np.testing.assert_allclose(short.data[0].embedding, found.data[0].embedding[:4], atol=1e-4)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 0


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", {}, "input", "it is required"),
        ("/v1/embeddings", {"input": []}, "input", "none of the lists empty"),
        ("/v1/embeddings", {"input": ["a", 3]}, "input", "expected a text, a list of texts"),
        ("/v1/embeddings", {"input": [99999]}, "input", "token id 99999 is outside the vocabulary"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "expected a whole number of at least 1"),
        ("/v1/embeddings", {"input": "a", "dimensions": 33}, "dimensions", "at most 32, found 33"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid enum value"),
        ("/v1/embeddings", {"input": "a", "output_dtype": "int8"}, "output_dtype", "needs the range of each dimension"),
        ("/v1/embeddings", {"input": "a", "temperature": 1}, "temperature", "unknown field"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "expected -1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "text_1 has 2 texts and text_2 1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_1", "text_2 0"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "expected at least one"),
        ("/rerank", {"query": "a", "documents": [{"txt": "b"}]}, "documents[0]", "expected a text or an object"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "expected a whole number of at least 1"),
    ],
)
def test_a_mistake_is_named(app: Starlette, path: str, body: dict[str, Any], param: str, message: str) -> None:
    error = error_of(post(app, path, body))
    assert error["param"] == param
    assert message in error["message"]


# --- /classify, /score, /rerank ---------------------------------------------------------------------------------------


def test_labels_have_the_probabilities_of_all_in_the_models_order(app: Starlette, engines: dict[str, Engine]) -> None:
    found = answered(app, "/classify", model="topics", input=TEXTS)
    assert found.keys() == {"id", "object", "created", "model", "data", "usage"}
    for i, (one, expected) in enumerate(zip(found["data"], engines["topics"].classify(TEXTS), strict=True)):
        assert (one["index"], one["label"], one["num_classes"]) == (i, expected.label, 3)
        by_index = {label.index: label.score for label in expected.labels}
        assert one["probs"] == pytest.approx([by_index[k] for k in range(3)], abs=1e-4)
        assert sum(one["probs"]) == pytest.approx(1, abs=1e-4)
    [raw] = answered(app, "/classify", model="topics", input=TEXTS[0], use_activation=False)["data"]
    assert raw["probs"] == pytest.approx(engines["topics"].classify(TEXTS[0]).logits.tolist(), abs=1e-4)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_a_reranker_scores_pairs_one_with_each_or_each_with_its_own(
    path: str, app: Starlette, engines: dict[str, Engine]
) -> None:
    found = answered(app, path, model="reranker", text_1="how are you", text_2=TEXTS)["data"]
    expected = [one.score for one in engines["reranker"].classify([("how are you", text) for text in TEXTS])]
    assert [one["score"] for one in found] == pytest.approx(expected, abs=1e-4)
    assert [(one["index"], one["object"]) for one in found] == [(i, "score") for i in range(3)]
    own = answered(app, path, model="reranker", text_1=TEXTS, text_2=TEXTS[::-1])["data"]
    expected = [one.score for one in engines["reranker"].classify(list(zip(TEXTS, TEXTS[::-1], strict=True)))]
    assert [one["score"] for one in own] == pytest.approx(expected, abs=1e-4)


def test_a_model_that_embeds_scores_by_the_cosine(app: Starlette, engines: dict[str, Engine]) -> None:
    found = answered(app, "/score", model="vectors", text_1="the cat", text_2=TEXTS)["data"]
    vectors = engines["vectors"].embed(["the cat", *TEXTS])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert [one["score"] for one in found] == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-4)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("model", ["reranker", "vectors"])
def test_documents_come_best_first_with_their_places(path: str, model: str, app: Starlette) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    found = answered(app, path, model=model, query="a small bird", documents=documents)
    scores = answered(app, "/score", model=model, text_1="a small bird", text_2=TEXTS)["data"]
    by_index = {one["index"]: one["relevance_score"] for one in found["results"]}
    assert by_index == pytest.approx({one["index"]: one["score"] for one in scores}, abs=1e-4)
    ranked = [one["relevance_score"] for one in found["results"]]
    assert ranked == sorted(ranked, reverse=True)
    assert all(one["document"] == {"text": TEXTS[one["index"]]} for one in found["results"])
    best = answered(app, path, model=model, query="a small bird", documents=documents, top_n=1, return_documents=False)
    assert [one.keys() for one in best["results"]] == [{"index", "relevance_score"}]
    assert best["results"][0]["index"] == found["results"][0]["index"]


# --- which endpoints a model has --------------------------------------------------------------------------------------

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/classify": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "cat"},
    "/rerank": {"query": "a", "documents": ["cat"]},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
}
HAS = {
    "vectors": {"/v1/embeddings", "/score", "/rerank"},
    "reranker": {"/classify", "/score", "/rerank"},
    "topics": {"/classify"},
    "t5": {"/v1/completions", "/v1/chat/completions", "/v1/responses"},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("model", HAS)
def test_an_endpoint_that_a_model_has_not_names_those_that_it_has(model: str, path: str, app: Starlette) -> None:
    response = post(app, path, ENDPOINTS[path] | {"model": model})
    if path not in HAS[model]:
        error = error_of(response, 404)
        assert error["message"].startswith(f"{path!r} is not for the model {model!r}, which has /")
        assert (error["param"], error["code"]) == ("model", "not_found")
    elif model == "t5" and path != "/v1/completions":
        assert error_of(response)["message"].endswith("this model has no chat template: use /v1/completions")
    else:
        assert response.status_code == 200


def test_ollamas_endpoints_and_the_page_refuse_a_model_that_generates_nothing(
    app: Starlette, engines: dict[str, Engine]
) -> None:
    response = post(app, "/api/generate", {"model": "vectors", "prompt": "a"})
    assert response.status_code == 404
    assert response.json()["error"].startswith("'/api/generate' is not for the model 'vectors'")
    shown = {
        name: post(app, "/api/show", {"model": name}).json()["capabilities"] for name in ("vectors", "topics", "t5")
    }
    assert shown == {"vectors": ["embedding"], "topics": [], "t5": ["completion"]}
    assert "no model here continues texts" in error_of(get(app, "/inspect/models"), 404)["message"]


# --- completions of an encoder-decoder --------------------------------------------------------------------------------


def test_completions_of_an_encoder_decoder_are_its_decoders_text(app: Starlette, engines: dict[str, Engine]) -> None:
    body = {"model": "t5", "prompt": TEXTS, "temperature": 0, "max_tokens": 5, "no_repeat_ngram_size": 1}
    found = answered(app, "/v1/completions", **body)
    expected = engines["t5"].generate(TEXTS, do_sample=False, max_new_tokens=5, no_repeat_ngram_size=1)
    assert [one["text"] for one in found["choices"]] == [one.text for one in expected]
    assert found["usage"]["prompt_tokens"] == sum(one.prompt_tokens for one in expected)
    streamed = chunks_of(post(app, "/v1/completions", body | {"prompt": TEXTS[0], "stream": True}).text)
    assert "".join(one["text"] for chunk in streamed for one in chunk["choices"]) == expected[0].text


def test_a_source_and_a_text_of_an_encoder_decoder_do_not_share_the_context(app: Starlette) -> None:
    long = {"model": "t5", "prompt": "cat " * 900, "temperature": 0}
    assert answered(app, "/v1/completions", **long, max_tokens=4000, stop="are")["usage"]["prompt_tokens"] > 900


# --- limits, the queue, the end ---------------------------------------------------------------------------------------


def test_limits_of_texts_and_tokens_hold(engines: dict[str, Engine]) -> None:
    app = make_app({"vectors": engines["vectors"]}, limits=Limits(max_prompts=2, max_prompt_tokens=5))
    assert "3 texts, and this server allows 2" in error_of(post(app, "/v1/embeddings", {"input": TEXTS}))["message"]
    error = error_of(post(app, "/v1/embeddings", {"input": TEXTS[0]}))
    assert "a text has 8 tokens, and this server allows 5" in error["message"]
    assert post(app, "/v1/embeddings", {"input": TEXTS[1]}).status_code == 200


def test_the_limit_counts_the_pairs_that_are_scored(engines: dict[str, Engine]) -> None:
    app = make_app({"vectors": engines["vectors"]}, limits=Limits(max_prompts=2))
    assert post(app, "/score", {"text_1": "the cat", "text_2": TEXTS[:2]}).status_code == 200
    error = error_of(post(app, "/score", {"text_1": "the cat", "text_2": TEXTS}))
    assert "3 texts, and this server allows 2" in error["message"]


def test_texts_of_requests_that_wait_are_computed_together(engines: dict[str, Engine]) -> None:
    app = make_app({"vectors": engines["vectors"]})
    served = app.state.server.models["vectors"]
    sizes: list[int] = []
    held = threading.Event()
    real = served.aio.run

    async def run(function: Any, *args: Any) -> Any:
        if not args:
            return await real(function)
        sizes.append(len(args[0]))
        await asyncio.to_thread(held.wait, 20)
        return await real(function, *args)

    served.aio.run = run

    async def use(client: httpx.AsyncClient) -> list[httpx.Response]:
        asked = [client.post("/v1/embeddings", json={"input": TEXTS[:2], "dimensions": 4 + i // 3}) for i in range(5)]
        tasks = [asyncio.create_task(one) for one in asked]
        await until(lambda: served.queue.requests == 5)
        held.set()
        return await asyncio.gather(*tasks)

    responses = talk(app, use)
    assert sizes in ([2, 4, 4], [6, 4])  # those of other dimensions apart; the first may have been alone
    for i, response in enumerate(responses):
        vectors = [one["embedding"] for one in response.json()["data"]]
        np.testing.assert_allclose(vectors, engines["vectors"].embed(TEXTS[:2], dimensions=4 + i // 3), atol=1e-4)


class _Runner:
    """In the place of an `AsyncEngine`: computes when it is let."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.go = asyncio.Event()

    async def run(self, function: Any, texts: list[Any]) -> Any:
        self.batches.append(texts)
        await self.go.wait()
        return function(texts)


def test_a_request_that_is_given_up_takes_its_texts_out_of_the_queue() -> None:
    async def main() -> None:
        runner = _Runner()
        queue = TextQueue(runner)  # type: ignore[arg-type]
        first = asyncio.create_task(queue.compute("a", lambda texts: texts, [1]))
        await asyncio.sleep(0)
        left, stays = (asyncio.create_task(queue.compute("a", lambda texts: texts, [n])) for n in (2, 3))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        runner.go.set()
        assert (await first, await stays) == ([1], [3])
        await queue.drain()
        assert runner.batches == [[1], [3]]
        assert queue.requests == 0

    asyncio.run(main())


@pytest.mark.longer
def test_a_failure_reaches_those_whose_texts_were_in_the_call_and_the_queue_goes_on() -> None:
    async def main() -> None:
        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        runner = _Runner()
        runner.go.set()
        queue = TextQueue(runner)  # type: ignore[arg-type]

        def fail(texts: list[Any]) -> Any:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await queue.compute("bad", fail, [1, 2])
        assert await queue.compute("good", lambda texts: [10 * text for text in texts], [*range(AT_ONCE + 3)]) == [
            10 * n for n in range(AT_ONCE + 3)
        ]
        assert [len(batch) for batch in runner.batches] == [2, AT_ONCE, 3]
        gc.collect()
        assert reported == []  # no exception that nobody has looked at

    asyncio.run(main())


def test_texts_that_draining_does_not_wait_for_are_refused() -> None:
    """Those that are computed and those that wait: nobody waits for a result that never comes."""

    async def main() -> None:
        queue = TextQueue(_Runner())  # type: ignore[arg-type]
        calls = [asyncio.create_task(queue.compute(key, lambda texts: texts, [1, 2])) for key in "ab"]
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.drain(), 0.01)
        async with asyncio.timeout(30):
            found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in found] == [EngineStateError, EngineStateError]
        assert queue.requests == 0

    asyncio.run(main())


def test_a_full_queue_a_slow_answer_and_a_draining_server_say_so(engines: dict[str, Engine]) -> None:
    app = make_app({"vectors": engines["vectors"]}, limits=Limits(request_timeout=0.05), max_waiting=2)
    server = app.state.server
    served = server.models["vectors"]
    served.queue.requests = 2
    response = post(app, "/v1/embeddings", {"input": "a"})
    assert error_of(response, 429)["message"] == "2 requests wait, and the queue takes 2: try again later"
    assert int(response.headers["Retry-After"]) >= 1
    served.queue.requests = 0
    real = served.aio.run

    async def slow(function: Any, *args: Any) -> Any:
        await asyncio.sleep(5)

    served.aio.run = slow
    assert error_of(post(app, "/v1/embeddings", {"input": "a"}), 504)["code"] == "request_timeout"
    served.aio.run = real
    server.draining = True
    assert error_of(post(app, "/v1/embeddings", {"input": "a"}), 503)["code"] == "shutting_down"


def test_requests_are_counted(engines: dict[str, Engine]) -> None:
    app = make_app({"vectors": engines["vectors"]})
    tokens = answered(app, "/v1/embeddings", input=TEXTS)["usage"]["prompt_tokens"]
    post(app, "/v1/embeddings", {"input": "a", "dimensions": 99})
    lines = get(app, "/metrics").text.splitlines()
    assert f'minillm:request_prompt_tokens_sum{{model_name="vectors"}} {tokens:.1f}' in lines
    assert 'minillm:request_success_total{finished_reason="stop",model_name="vectors"} 1.0' in lines
    assert 'minillm:request_success_total{finished_reason="error",model_name="vectors"} 1.0' in lines
    assert 'minillm:http_requests_total{path="/v1/embeddings",status="200"} 1.0' in lines


def test_a_batch_file_may_ask_for_vectors(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"method": "POST", "url": "/v1/embeddings"}
    lines = [json.dumps(body | {"custom_id": f"{i}", "body": {"input": text}}) for i, text in enumerate(TEXTS)]
    source.write_text("\n".join(lines), encoding="utf-8")
    folder = write_task_model(tmp_path / "model", BERT)
    with Engine(folder) as engine:
        expected = engine.embed(TEXTS)
    assert run_batch(Engine(folder), source, target).failed == []
    answers = [json.loads(line)["response"]["body"] for line in target.read_text(encoding="utf-8").splitlines()]
    np.testing.assert_allclose([one["data"][0]["embedding"] for one in answers], expected, atol=1e-4)


def test_the_command_to_try_at_the_start_is_answered(app: Starlette) -> None:
    for name, served in app.state.server.models.items():
        endpoint = served.endpoints[0]
        assert post(app, endpoint, json.loads(EXAMPLES[endpoint]) | {"model": name}).status_code == 200
