"""A request without a length gets what fits, and the server tells the context that fits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.server import make_app

from .. import seq2seq
from ..server.client import TEMPLATE, error_of, get, post
from ..tiny import write_checkpoint

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A context of 1,024 positions, of which the cache holds fewer."""
    folder = write_checkpoint(tmp_path_factory.mktemp("fits"), max_position_embeddings=1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minillm.backends.memory.Memory.page_size", 32)
        with Engine(folder, max_batch_size=4) as engine:
            page = engine.runner.cache.storage.nbytes // engine.runner.cache.num_pages
        engine = Engine(folder, max_batch_size=4, cache_bytes=5 * page + page // 2)
    with engine:
        assert (engine.runner.cache.num_pages, engine.runner.cache.page_size) == (5, 32)
        engine.chat_template = TEMPLATE
        yield engine


@pytest.fixture(scope="module")
def app(engine: Engine) -> Starlette:
    return make_app(engine)


def positions(engine: Engine) -> int:
    return engine.runner.cache.num_pages * engine.runner.cache.page_size


def test_the_context_that_the_server_tells_is_the_one_that_fits(app: Starlette, engine: Engine) -> None:
    assert positions(engine) == engine.context < engine.config.max_positions
    [card] = get(app, "/v1/models").json()["data"]
    [running] = get(app, "/api/ps").json()["models"]
    about = post(app, "/api/show", {"model": "minillm"}).json()["model_info"]
    told = {
        card["max_model_len"],
        running["context_length"],
        about[f"{about['general.architecture']}.context_length"],
        post(app, "/tokenize", {"prompt": "a"}).json()["max_model_len"],
    }
    assert told == {positions(engine)}
    body = {"prompt": [5] * (positions(engine) - 1), "max_tokens": 1}
    assert post(app, COMPLETIONS, body).status_code == 200
    error = error_of(post(app, COMPLETIONS, body | {"max_tokens": 2}))
    assert error["code"] == "context_length_exceeded"
    assert f"the context of {positions(engine)}" in error["message"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        {"n": 4},
        {"num_beams": 3},
        {"n": 2, "num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        pytest.param({"temperature": 0, "lookahead_window": 2}, marks=pytest.mark.slow),
        {"temperature": 0, "penalty_alpha": 0.5, "top_k": 3},
        pytest.param({"use_cache": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_request_without_a_length_gets_as_much_as_one_with_a_length_may_ask_for(
    app: Starlette, fields: dict[str, Any]
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi. " * 8}], "seed": 1, "ignore_eos": True} | fields
    whole = post(app, CHATS, body)
    assert whole.status_code == 200, whole.text
    assert {choice["finish_reason"] for choice in whole.json()["choices"]} == {"length"}
    lengths = whole.json()["usage"]["completion_tokens"] // len(whole.json()["choices"])
    assert error_of(post(app, CHATS, body | {"max_tokens": lengths + 1}))
    streamed = post(app, CHATS, body | {"stream": True, "stream_options": {"include_usage": True}}).text
    assert f'"completion_tokens":{whole.json()["usage"]["completion_tokens"]}' in streamed


def test_a_response_without_a_length_gets_some(app: Starlette) -> None:
    assert post(app, "/v1/responses", {"input": "Hi"}).json()["usage"]["output_tokens"] > 0


def test_the_rest_of_the_context_is_the_limit_where_the_cache_holds_it(engine: Engine) -> None:
    request = engine.request([5] * 20, max_new_tokens=30)
    assert engine.fitted(request) is request
    cut = engine.fitted(engine.request([5] * 20, max_new_tokens=1000))
    assert cut.max_new_tokens == positions(engine) - 20
    assert cut.settings.max_new_tokens == cut.max_new_tokens


@pytest.mark.longer
def test_a_source_has_its_place_beside_the_text(tmp_path: Path) -> None:
    with Engine(seq2seq.write_checkpoint(tmp_path), max_batch_size=1) as engine:
        page = engine.runner.cache.storage.nbytes // engine.runner.cache.num_pages
    with Engine(tmp_path, max_batch_size=1, cache_bytes=3 * page) as engine:
        request = engine.fitted(engine.request([5, 6, 7], max_new_tokens=500))
        assert len(engine.generate([5, 6, 7], max_new_tokens=request.max_new_tokens, eos_token_id=None).token_ids) == (
            request.max_new_tokens
        )
