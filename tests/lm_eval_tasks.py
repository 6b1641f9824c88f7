"""Three tasks of lm-eval on a few lines of text each, one for each kind of request; no dataset is fetched."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SUMS = [(a, b) for a in range(2, 10, 2) for b in range(1, 10, 2)]
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"}
CITIES = sorted(CAPITALS.values())


@contextmanager
def offline(folder: Path) -> Iterator[None]:
    """A `with` block in which the libraries of datasets fetch nothing, and keep what they read in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        yield


def dataset(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Write rows to a file. Returns the fields of a task that read it."""
    path.write_text(json.dumps(rows), encoding="utf-8")
    files = {"test": os.fspath(path)}
    return {"task": path.stem, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}


def sums(folder: Path, count: int = len(SUMS), **generation: Any) -> dict[str, Any]:
    """Exact matches of generated text: what is 2 plus 1?"""
    rows = [{"text": f"What is {a} plus {b}?", "answer": f" {a + b}."} for a, b in SUMS[:count]]
    return dataset(folder / "sums.json", rows) | {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "temperature": 0} | generation,
        "metric_list": [{"metric": "exact_match"}],
    }


def capitals(folder: Path) -> dict[str, Any]:
    """One of several choices: the capital of France."""
    rows = [
        {"text": f"Q: What is the capital of {country}?\nA:", "label": CITIES.index(city)}
        for country, city in CAPITALS.items()
    ]
    return dataset(folder / "capitals.json", rows) | {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": CITIES,
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }


def pages(folder: Path, texts: list[str]) -> dict[str, Any]:
    """Perplexities of whole texts."""
    return dataset(folder / "pages.json", [{"page": text} for text in texts]) | {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    }


def evaluated(model: Any, tasks: list[dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    """The results of lm-eval on some tasks, with every sample."""
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

    made = [ConfigurableTask(config=dict(task)) for task in tasks]
    manager = TaskManager(include_defaults=False)  # its 14,000 own tasks take 14 s to read
    arguments |= {"task_manager": manager, "bootstrap_iters": 0, "log_samples": True}
    return dict(simple_evaluate(model=model, tasks=made, **arguments))


def figures(results: dict[str, Any]) -> dict[str, float]:
    """Task and metric -> figure."""
    rows = results["results"].items()
    return {f"{task} {name}": value for task, row in rows for name, value in row.items() if isinstance(value, float)}
