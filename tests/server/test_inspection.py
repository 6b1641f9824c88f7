"""The paths that the page uses beyond OpenAI's API, and the page's own files."""

import asyncio
import re
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.measure.comparison import STRATEGIES
from minillm.server import make_app
from minillm.server.inspection import RECOMMENDED
from minillm.server.page import FOLDER

from .client import error_of, get, post, talk


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    """The same model, not behind a server."""
    with Engine() as engine:
        yield engine


def test_models_and_strategies(app: Starlette, demo: Engine) -> None:
    [model] = get(app, "/inspect/models").json()["models"]
    config = demo.config
    sizes = {"layers": config.num_layers, "heads": config.num_heads, "vocabulary": config.vocab_size, "context": 512}
    assert model.items() >= ({"name": "demo", "chat": True} | sizes).items()
    assert [each["name"] for each in model["strategies"]] == [RECOMMENDED, *(variant.name for variant in STRATEGIES)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", STRATEGIES, ids=lambda variant: variant.name)
def test_the_fields_of_a_strategy_select_it(app: Starlette, plain: Engine, variant) -> None:
    [model] = get(app, "/inspect/models").json()["models"]
    [fields] = [each["fields"] for each in model["strategies"] if each["name"] == variant.name]
    sampled = {"seed": 5} if variant.fields["do_sample"] else {}
    answer = post(app, "/v1/completions", {"prompt": "Once upon", "max_tokens": 6, **fields, **sampled}).json()
    expected = plain.generate("Once upon", max_new_tokens=6, **variant.fields, **sampled)
    assert answer["choices"][0]["text"] == expected.text


def test_tokens_are_bytes(app: Starlette, demo: Engine) -> None:
    ids = demo.tokenizer.encode("Grüße, 猫!")
    found = post(app, "/inspect/tokens", {"token_ids": ids}).json()["tokens"]
    assert [token["special"] for token in found] == [True] + [False] * (len(ids) - 1)
    assert found[0]["text"] == "</s>"
    assert b"".join(bytes(token["bytes"]) for token in found[1:]).decode() == "Grüße, 猫!"


def test_attention_is_the_engine_s_and_sums_to_1(app: Starlette, demo: Engine) -> None:
    ids = demo.tokenizer.encode("A list of colors: red,")
    weights = np.array(post(app, "/inspect/attention", {"token_ids": ids}).json()["weights"])
    assert weights.shape == (6, 6, len(ids))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(weights, demo.attention(ids), atol=1e-6)
    one = post(app, "/inspect/attention", {"token_ids": ids, "layer": 4}).json()["weights"]
    np.testing.assert_allclose(one, weights[4:5], atol=1e-6)


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 0}, {"repetition_penalty": 1.3}]
)
def test_steps_are_the_engines_explanation(app: Starlette, plain: Engine, fields: dict[str, float]) -> None:
    ids = plain.tokenizer.encode("A list of colors:")
    answer = post(app, "/inspect/steps", {"prompt": ids, **fields}).json()
    sampled = fields.get("temperature") != 0
    own = {name: value for name, value in fields.items() if value}
    explanation = plain.explain(ids, **({"do_sample": True, "top_k": 0} if sampled else {}), **own)
    assert answer["greedy"] is explanation.greedy is not sampled
    assert [step["name"] for step in answer["steps"]] == [step.name for step in explanation.steps]
    assert [step["tokens_left"] for step in answer["steps"]] == [step.tokens_left for step in explanation.steps]
    assert answer["token_ids"] == explanation.likeliest(8)
    for step, own_step in zip(answer["steps"], explanation.steps, strict=True):
        np.testing.assert_allclose(step["probabilities"], own_step.probabilities[answer["token_ids"]], rtol=1e-4)
        assert step["entropy"] == pytest.approx(own_step.entropy, abs=1e-4)
    assert post(app, "/inspect/steps", {"prompt": "A list of colors:", **fields}).json() == answer


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 3}, "sampling, found beam search"),
        ({"temperature": -1}, "temperature"),
        ({"prompt": ["a", "b"]}, "prompt: expected one text"),
        ({"prompt": [2, 99999]}, "99999"),
        ({"token_ids": [2]}, "token_ids"),
    ],
)
def test_steps_refuse_what_they_cannot_show(app: Starlette, fields: dict[str, object], message: str) -> None:
    answer = post(app, "/inspect/steps", {"prompt": "A", **fields})
    assert answer.status_code == 400 and message in error_of(answer)["message"]


@pytest.mark.longer
def test_attention_runs_beside_requests(app: Starlette, demo: Engine, plain: Engine) -> None:
    ids = demo.tokenizer.encode("Once upon a time " * 60)[:400]

    async def both(client: httpx.AsyncClient) -> list[httpx.Response]:
        body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
        looks = [client.post("/inspect/attention", json={"token_ids": ids, "layer": 1}) for _ in range(3)]
        return await asyncio.gather(client.post("/v1/completions", json=body), *looks)

    answer, *looks = talk(app, both)
    assert answer.json()["choices"][0]["text"] == plain.generate("Once upon a time", max_new_tokens=20).text
    assert len({look.text for look in looks}) == 1


def test_load(app: Starlette) -> None:
    found = get(app, "/inspect/load?model=demo").json()
    assert found["running"] == found["waiting"] == 0
    assert 0 <= found["cached_pages"] <= found["free_pages"] == found["total_pages"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/inspect/tokens", {"token_ids": [2048]}, "2048"),
        ("/inspect/tokens", {"token_ids": [-1]}, "-1"),
        ("/inspect/tokens", {"token_ids": ["a"]}, "token_ids"),
        ("/inspect/tokens", {"token_ids": [3] * 10_001}, "at most 10000"),
        ("/inspect/tokens", {}, "token_ids"),
        ("/inspect/attention", {"token_ids": []}, "empty"),
        ("/inspect/attention", {"token_ids": [2, 99999]}, "99999"),
        ("/inspect/attention", {"token_ids": [2], "layer": 6}, "layers are 0 to 5"),
        ("/inspect/attention", {"token_ids": [2], "layer": -1}, "layers are 0 to 5"),
        ("/inspect/attention", {"token_ids": [2] * 513}, "context holds 512"),
        ("/inspect/attention", {"token_ids": [2] * 200_000}, "weights"),
        ("/inspect/attention", {"token_ids": [2], "head": 1}, "head"),
    ],
)
def test_mistakes_are_refused_by_name(app: Starlette, path: str, body: dict, words: str) -> None:
    error = error_of(post(app, path, body))
    assert words in error["message"]
    assert (error["param"] or "").partition("[")[0] in (*body, "token_ids")


def test_an_unknown_model(app: Starlette) -> None:
    assert error_of(get(app, "/inspect/load?model=x"), 404)["code"] == "model_not_found"
    assert error_of(post(app, "/inspect/tokens", {"model": "x", "token_ids": []}), 404)["code"] == "model_not_found"


# --- the page's files -------------------------------------------------------------------------------------------------


def test_the_page_may_use_nothing_but_its_server(app: Starlette) -> None:
    page = get(app, "/")
    assert page.headers["content-type"].startswith("text/html")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}
    assert "unsafe" not in page.headers["content-security-policy"]


def test_every_file_is_served_and_none_names_another_host(app: Starlette) -> None:
    names = {path.name for path in FOLDER.iterdir() if path.suffix in (".css", ".js", ".svg")}
    asked = set(re.findall(r'(?:href|src)="page/([^"]+)"', get(app, "/").text))
    for name in names:
        answer = get(app, f"/page/{name}")
        assert answer.status_code == 200
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "innerHTML" not in answer.text and "eval(" not in answer.text
        asked |= set(re.findall(r'from "\./([^"]+)"', answer.text))
    assert asked == names | {"tokens.css"}
    assert get(app, "/page/__init__.py").status_code == 404
    assert get(app, "/page/..%2fapp.py").status_code == 404


def test_the_page_is_open_and_what_it_asks_for_is_not(demo: Engine) -> None:
    closed = make_app({"demo": demo}, keys=["right"])
    assert get(closed, "/").status_code == get(closed, "/page/app.js").status_code == 200
    for path in ("/inspect/models", "/inspect/load"):
        error_of(get(closed, path), 401)
        assert get(closed, path, headers={"Authorization": "Bearer right"}).status_code == 200
    for path in ("/inspect/tokens", "/inspect/attention"):
        error_of(post(closed, path, {"token_ids": [2]}), 401)
