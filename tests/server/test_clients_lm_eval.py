"""lm-eval against a real server, on two small tasks of the demo model's own kind; no dataset is fetched.

Every log-probability and every text is that of the engine alone, so the scores are, too.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server needs the extra serve")
pytest.importorskip("lm_eval", reason="the client is in the extra clients")
pytest.importorskip("tenacity", reason="lm-eval's client of servers is in the extra clients")

from minillm import Engine
from minillm.server import make_app

from ..lm_eval_tasks import CAPITALS, CITIES, SUMS, capitals, evaluated, offline, sums
from .client import listening

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of both tasks."""
    folder = tmp_path_factory.mktemp("lm_eval")
    app = make_app({"demo": Engine(max_batch_size=16, prefix_cache=True)})
    with offline(folder), listening(app) as url:
        return evaluated(
            "local-completions",
            [sums(folder), capitals(folder)],
            model_args={
                "model": "demo",
                "base_url": f"{url}/v1/completions",
                "tokenizer_backend": "remote",
                "tokenized_requests": True,
                "num_concurrent": 4,
                "max_length": 512,
            },
            batch_size=8,
        )


def test_texts_and_their_exact_matches(found: dict[str, Any], alone: Engine) -> None:
    matches = 0
    for sample in found["samples"]["sums"]:
        ids = alone.tokenizer.encode(sample["doc"]["text"], add_special_tokens=False)
        expected = alone.generate(ids, max_new_tokens=6, stop_strings=["\n"]).text
        assert sample["resps"][0][0] == expected
        matches += expected == sample["doc"]["answer"]
    assert found["results"]["sums"]["exact_match,none"] == pytest.approx(matches / len(SUMS))
    assert matches > len(SUMS) / 2


def test_log_probabilities_and_the_choices_they_make(found: dict[str, Any], alone: Engine) -> None:
    right = 0
    for sample in found["samples"]["capitals"]:
        sums = []
        for [(value, _)], city in zip(sample["resps"], CITIES, strict=True):
            text = sample["doc"]["text"]
            start = len(alone.tokenizer.encode(text, add_special_tokens=False))
            ids = alone.tokenizer.encode(f"{text} {city}", add_special_tokens=False)
            sums.append(math.fsum(alone.score(ids).logprobs[start:]))
            assert float(value) == pytest.approx(sums[-1], abs=1e-3)
        right += sums.index(max(sums)) == sample["doc"]["label"]
    assert found["results"]["capitals"]["acc,none"] == pytest.approx(right / len(CAPITALS))
    assert right > len(CAPITALS) / 2
