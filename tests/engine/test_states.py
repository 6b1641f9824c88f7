"""A model whose layers keep states, in an engine: prefixes in files, helpers, memory, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from minillm import Engine
from minillm.backends.states import SLOTS_PER_SEQUENCE, state_bytes
from minillm.engine.footprint import footprints
from minillm.errors import CacheFullError, ParameterError
from minillm.models import published_config

from ..families import CONFIGS
from ..tiny import TOKENIZER, tiny_tensors

LINE = np.random.default_rng(0).integers(3, 512, 300).tolist()
"""Two pages of 128 positions, and a part of one"""
TAPS = {"lfm2": 3, "qwen3_5_text": 4}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of a model whose convolutions keep states."""
    return written(tmp_path_factory.mktemp("lfm2"), "lfm2")


@pytest.fixture(scope="module", params=["lfm2", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def any_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Besides, one of a model whose linear attention keeps two arrays."""
    return written(tmp_path_factory.mktemp(request.param), request.param)


def written(folder: Path, family: str) -> Path:
    """A checkpoint folder of a family with the small tokenizer."""
    raw = CONFIGS[family]["grouped"] | {"vocab_size": 512, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    tensors = {}
    for name, tensor in tiny_tensors(raw).items():
        array = tensor.load()
        if name.endswith(("conv.conv.weight", "conv1d.weight")):  # as published: [C, 1, k]
            array = np.ascontiguousarray(array.reshape(TAPS[family], -1).T[:, None])
        tensors[f"model.{name}" if name != "lm_head.weight" else name] = array
    save_file(tensors, folder / "model.safetensors")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


def tokens(engine: Engine, line: list[int], **fields: Any) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's were found."""
    answer = engine.generate(line, **GREEDY | fields)
    return answer.token_ids, answer.cached_tokens


@pytest.mark.longer
@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_a_prompt_goes_on_at_the_border_of_a_page(any_folder: Path, backend: str) -> None:
    with (
        Engine(any_folder, backend=backend, prefix_cache=False) as plain,
        Engine(any_folder, backend=backend) as engine,
    ):
        expected, _ = tokens(plain, LINE)
        assert tokens(engine, LINE) == (expected, 0)
        assert tokens(engine, LINE) == (expected, 256)
        assert tokens(engine, [*LINE[:256], 5]) == (tokens(plain, [*LINE[:256], 5])[0], 256)
        assert tokens(engine, [*LINE[:255], 5]) == (tokens(plain, [*LINE[:255], 5])[0], 128)


def test_a_saved_prefix_gives_another_process_the_same_tokens(any_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prefix.safetensors"
    with Engine(any_folder, backend="cpu") as engine:
        expected, _ = tokens(engine, LINE)
        saved = engine.save_prefix(path, LINE)
        assert saved.tokens == 256
        with pytest.raises(
            ParameterError, match="states, which are saved after every 128 tokens, and the prompt has 9"
        ):
            engine.save_prefix(path, LINE[:9])
    with Engine(any_folder, backend="cpu") as engine:
        assert engine.load_prefix(path) == saved
        assert tokens(engine, LINE) == (expected, 256)


@pytest.mark.longer
def test_a_store_gives_another_process_the_same_tokens(any_folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for cached in (0, 256):
        with Engine(any_folder, backend="cpu", prefix_store=str(store)) as engine:
            found = tokens(engine, LINE)
            assert found[1] == cached
            assert found[0] == tokens(engine, LINE, use_cache=False)[0]
    assert len([*store.glob("prefix-*")]) == 2


@pytest.mark.longer
@pytest.mark.parametrize(
    "fields", [{}, {"num_assistant_tokens": 0, "prompt_lookup_num_tokens": 3}, {"num_assistant_tokens": 2}]
)
def test_a_draft_model_with_states_changes_no_token(any_folder: Path, fields: dict[str, Any]) -> None:
    with Engine(any_folder, backend="cpu", deterministic=True) as plain:
        expected = tokens(plain, LINE[:40], max_new_tokens=40)
    with Engine(any_folder, backend="cpu", deterministic=True, draft=any_folder) as engine:
        assert tokens(engine, LINE[:40], max_new_tokens=40, **fields) == expected


def test_memory_counts_pages_of_attention_and_slots(folder: Path) -> None:
    with Engine(folder, backend="numpy", max_batch_size=4) as engine:
        cache, config = engine.runner.cache, engine.config
        states = cache.num_states * state_bytes(config.layer_states)
        assert state_bytes(config.layer_states) == 2 * 2 * 32 * 4
        assert cache.num_states == 4 * SLOTS_PER_SEQUENCE + cache.num_pages
        page = cache.page_size * 2 * config.num_kv_heads * config.head_dim * 4
        assert cache.storage.nbytes == cache.num_pages * page + states
        assert not footprints([engine.runner]), "of a device alone"
    least = page + (1 + 4 * SLOTS_PER_SEQUENCE) * 512
    with pytest.raises(ParameterError, match=rf"at least {least} \(one page of 128, and states of 4 sequences\)"):
        Engine(folder, backend="numpy", max_batch_size=4, cache_bytes=least - 1)
    with Engine(folder, backend="numpy", max_batch_size=4, cache_bytes=least) as engine:
        assert engine.runner.cache.num_pages == 1
        with pytest.raises(CacheFullError):
            engine.generate(LINE)


def test_layers_without_attention_have_no_weights_to_show(folder: Path) -> None:
    with Engine(folder, backend="numpy") as engine:
        assert engine.attention(LINE[:9]).shape == (1, 4, 9)
        with pytest.raises(ParameterError, match=r"layer 2 has no attention: expected layers of \[1\]"):
            engine.attention(LINE[:9], layers=[2])


def test_a_published_model_keeps_as_many_bytes_of_a_sequence_as_six_positions_take() -> None:
    config = published_config("lfm2-1.2b")
    assert state_bytes(config.layer_states) == 10 * 2 * 2048 * 4
    assert config.layers_with_keys() == [2, 5, 8, 10, 12, 14]
