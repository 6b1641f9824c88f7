"""lm-eval against a real server, on two small tasks of the demo model's own kind; no dataset is fetched.

Every log-probability and every text is that of the engine alone, so the scores are, too.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server needs the extra serve")
pytest.importorskip("lm_eval", reason="the client is in the extra clients")

from minillm import Engine
from minillm.server import make_app

from .client import listening

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SUMS = [(a, b) for a in range(2, 10, 2) for b in range(1, 10, 2)]
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"}


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of both tasks."""
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask

    folder = tmp_path_factory.mktemp("lm_eval")
    patch = pytest.MonkeyPatch()
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        patch.setenv(name, "1")
    patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    sums = [{"text": f"What is {a} plus {b}?", "answer": f" {a + b}."} for a, b in SUMS]
    cities = sorted(CAPITALS.values())
    capitals = [
        {"text": f"Q: What is the capital of {country}?\nA:", "label": cities.index(city)}
        for country, city in CAPITALS.items()
    ]
    tasks = [
        ConfigurableTask(
            config={
                **dataset(folder / "sums.json", sums),
                "task": "sums",
                "output_type": "generate_until",
                "doc_to_text": "{{text}}",
                "doc_to_target": "{{answer}}",
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "temperature": 0},
                "metric_list": [{"metric": "exact_match"}],
            }
        ),
        ConfigurableTask(
            config={
                **dataset(folder / "capitals.json", capitals),
                "task": "capitals",
                "output_type": "multiple_choice",
                "doc_to_text": "{{text}}",
                "doc_to_choice": cities,
                "doc_to_target": "label",
                "metric_list": [{"metric": "acc"}],
            }
        ),
    ]
    with patch.context(), listening(make_app({"demo": Engine(max_batch_size=16, prefix_cache=True)})) as url:
        results = simple_evaluate(
            model="local-completions",
            model_args={
                "model": "demo",
                "base_url": f"{url}/v1/completions",
                "tokenizer_backend": "remote",
                "tokenized_requests": True,
                "num_concurrent": 4,
                "max_length": 512,
            },
            tasks=tasks,
            batch_size=8,
            log_samples=True,
            bootstrap_iters=0,
        )
    patch.undo()
    assert results is not None
    return dict(results)


def dataset(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Write rows to a file. Returns the fields of a task that read it."""
    path.write_text(json.dumps(rows), encoding="utf-8")
    return {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}


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
        for [(value, _)], city in zip(sample["resps"], sorted(CAPITALS.values()), strict=True):
            text = sample["doc"]["text"]
            start = len(alone.tokenizer.encode(text, add_special_tokens=False))
            ids = alone.tokenizer.encode(f"{text} {city}", add_special_tokens=False)
            sums.append(math.fsum(alone.score(ids).logprobs[start:]))
            assert float(value) == pytest.approx(sums[-1], abs=1e-3)
        right += sums.index(max(sums)) == sample["doc"]["label"]
    assert found["results"]["capitals"]["acc,none"] == pytest.approx(right / len(CAPITALS))
    assert right > len(CAPITALS) / 2
