"""Engines of models with a sliding window: the same answers as with all positions, from less memory."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm import Engine
from minillm.backends.memory import Memory
from minillm.cache import Concurrency
from minillm.measure.accounting import Storage, cache_bytes

from .. import scheduling
from ..models import test_gemma3_text, test_mistral
from ..tiny import TOKENIZER, tiny_tensors
from . import test_preemption

CONFIGS: dict[str, dict[str, Any]] = {
    "some layers": test_gemma3_text.CONFIG | {"sliding_window": 6, "num_hidden_layers": 3},
    "all layers": test_mistral.CONFIG | {"sliding_window": 5},
}
PROMPT = np.random.default_rng(1).integers(3, 500, 40).tolist()


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and a margin that short texts outgrow."""
    monkeypatch.setattr(Memory, "page_size", 4)
    monkeypatch.setattr(Memory, "max_prompt_tokens", 8)
    for module in ("cache.windows", "cache.paged", "cache.prefix", "measure.accounting.memory"):
        monkeypatch.setattr(f"minillm.{module}.MARGIN", 2)


def checkpoint(folder: Path, raw: dict[str, Any], noise: float = 0.0) -> Path:
    raw = raw | {"vocab_size": 512}
    tensors = {f"model.{name}": tensor.load() for name, tensor in tiny_tensors(raw, 2).items()}
    embedding = tensors["model.embed_tokens.weight"]
    embedding += noise * np.random.default_rng(0).standard_normal(embedding.shape).astype(np.float32)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model", CONFIGS[request.param])


@pytest.fixture
def whole(folder: Path) -> list[int]:
    """The answer of an engine whose layers keep all positions."""
    with Engine(folder, backend="numpy") as engine:
        engine.runner.cache.windows.clear()  # before anything is computed
        storage = engine.runner.cache.storage
        assert storage.groups[1].keys.shape[1] == engine.runner.cache.num_pages
        return answer(engine)


def answer(engine: Engine) -> list[int]:
    return engine.generate(PROMPT, max_new_tokens=16, eos_token_id=[]).completions[0].token_ids


def test_an_engine_keeps_the_windows_and_answers_the_same(folder: Path, whole: list[int]) -> None:
    with Engine(folder, backend="numpy", prefix_cache=False, max_batch_size=1, max_batched_tokens=8) as engine:
        assert answer(engine) == whole
        [window], pages = engine.runner.cache.windows, engine.runner.cache.backed_pages
        assert window.backed < pages == 14
        group = engine.config.kv_groups[1]
        of_window = window.backed * 4 * len(group.layers) * 8 * group.num_kv_heads * group.head_dim
        others = engine.config.kv_groups[0]
        of_others = pages * 4 * len(others.layers) * 8 * others.num_kv_heads * others.head_dim
        assert engine.summary()["cache_bytes"] == of_window + of_others
        assert cache_bytes(engine.config, Storage(), 56) <= of_window + of_others


@pytest.mark.longer
def test_a_prefix_store_and_a_saved_prefix_serve_another_engine(
    folder: Path, whole: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.cache.prefix_store.WORTH_STORING", 8)
    store = str(tmp_path / "store")
    with Engine(folder, backend="numpy", prefix_store=store) as engine:
        assert answer(engine) == whole
        engine.save_prefix(tmp_path / "prompt.safetensors", PROMPT)
    with Engine(folder, backend="numpy", prefix_store=store) as engine:
        longer = engine.generate([*PROMPT, *whole], max_new_tokens=2, eos_token_id=[])
        assert longer.cached_tokens >= 52, "all full pages of what was computed"
    with Engine(folder, backend="numpy") as engine:
        expected = engine.generate([*PROMPT, *whole], max_new_tokens=2, eos_token_id=[])
        assert longer.completions[0].token_ids == expected.completions[0].token_ids
    with Engine(folder, backend="numpy") as engine:
        engine.load_prefix(tmp_path / "prompt.safetensors")
        answered = engine.generate(PROMPT, max_new_tokens=16, eos_token_id=[])
        assert answered.completions[0].token_ids == whole
        assert answered.cached_tokens == 39


@pytest.fixture(params=CONFIGS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    model, draft = (
        checkpoint(tmp_path / name, CONFIGS[request.param], noise) for name, noise in (("a", 0), ("b", 0.02))
    )
    with Engine(model, draft=draft, backend="numpy", max_batch_size=1) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_random_workload_keeps_its_books(engine: Engine, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All strategies, preempted, in small caches: see test_preemption.py."""
    loop_on = scheduling.loop_on
    monkeypatch.setattr(
        test_preemption,
        "loop_on",
        lambda engine, pages, **fields: loop_on(
            engine, pages, concurrency=Concurrency(fields.get("size", 8), fields.get("budget", 512)), **fields
        ),
    )
    for kind in [kind for kind, fields in scheduling.STRATEGIES.items() if "lora" in fields]:
        monkeypatch.delitem(scheduling.STRATEGIES, kind)
    assert test_preemption.run_workload(engine, seed, monkeypatch, count=10, prefix_cache=bool(seed % 2)) >= 0
